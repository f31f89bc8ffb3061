"""Rules for element-wise operators, operators with a dimension as argument, and changes of shape."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crossbow_py.engine.fusion.rules.registry import (
    Call,
    NotFusedError,
    arguments_by_name,
    base_name,
    is_in_place,
    rule,
    run,
)
from crossbow_py.engine.fusion.values import (
    Fused,
    Layout,
    PerLearner,
    folds,
    map_values,
    rank_of,
    split_learners,
    values_in,
    with_rank,
    wrap,
)

# Element-wise operators without the tag that says so.
POINTWISE = frozenset({
    "clone", "detach", "to", "_to_copy", "type_as", "relu6", "selu", "celu", "rsub", "square", "softplus", "clamp",
    "clip", "logical_not", "masked_fill", "float_power", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "mish",
    "silu", "true_divide", "relu", "gelu", "elu", "where", "log_sigmoid", "floor_divide", "__and__", "__or__",
    "__xor__", "absolute", "negative", "multiply", "divide", "subtract",
})  # fmt: skip
_FORMAT = "memory_format"  # ignored: rules choose layouts
_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "source", "destination")
_ANY_DIMENSIONS = ("mean", "sum", "amax", "amin", "logsumexp", "linalg_vector_norm", "var", "std", "any", "all")


def pointwise(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run in CHANNELS if all tensors are and match, else in STACK, aligned to broadcast as one learner's do."""
    kwargs = {name: value for name, value in kwargs.items() if name != _FORMAT}
    values = [value for value in values_in([*args, *kwargs.values()]) if isinstance(value, Fused)]
    keep = _all_channels(values)
    rank = max(rank_of(value) for value in values)
    if base_name(call.target) == "masked_fill" and isinstance(args[2], Fused) and args[2].layout is not Layout.SHARED:
        raise NotFusedError  # a value of each learner, where torch takes one

    def tensor(value: Fused) -> Tensor:
        if keep or value.layout is Layout.SHARED:
            return value.tensor
        return with_rank(call.stack(value), rank)

    layout = Layout.CHANNELS if keep else Layout.STACK
    own = args[0] if isinstance(args[0], Fused) else None
    if call.may_write and own is not None and len(values) == 1 and (whole := _whole(own)) is not None:
        return Fused(split_learners(call.target(whole, *args[1:], **kwargs), 0, call.num_learners), layout)
    in_place = call.may_write and own is not None and own.layout is layout and not _is_result_view(own.tensor)
    plain = [map_values(argument, tensor) for argument in args]
    named = {name: map_values(value, tensor) for name, value in kwargs.items()}
    result = call.target(*plain, **named) if in_place else call.functional(*plain, **named)
    if is_in_place(call.target):
        result = result.to(plain[0].dtype)  # which writing in place would keep
    elif result.is_floating_point() and (own_format := _format_beside_scalars(values)) is not None:
        result = result.to(own_format)
    return wrap(result, layout)


def _format_beside_scalars(values: list[Fused]) -> torch.dtype | None:
    """Return the format of floating tensors beside scalars, which decide none; None if there are not both.

    Scalars of all learners have a dimension, and would.
    """
    formats = [value.tensor.dtype for value in values if rank_of(value)]
    if len(formats) == len(values) or not formats or not all(each.is_floating_point for each in formats):
        return None
    return functools.reduce(torch.promote_types, formats)


def _whole(value: Fused) -> Tensor | None:
    """Return the `[K·B, ...]` that a `[K, B, ...]` is a view of, which autograd lets be written without a copy."""
    own, base = value.tensor, value.tensor._base
    if base is None or not folds(value) or base.shape != (own.shape[0] * own.shape[1], *own.shape[2:]):
        return None
    return base if own.stride()[1:] == base.stride() and own.storage_offset() == base.storage_offset() else None


def _is_result_view(tensor: Tensor) -> bool:
    """Return whether a custom autograd function has returned the tensor as a view, which may not be written."""
    return tensor._is_view() and hasattr(type(tensor.grad_fn), "_forward_cls")


def _all_channels(values: list[Fused]) -> bool:
    tensors = [value for value in values if value.layout is Layout.CHANNELS]
    rest = [value for value in values if value.layout is not Layout.CHANNELS]
    if not tensors or any(value.layout is Layout.STACK or value.tensor.ndim for value in rest):
        return False
    first = tensors[0].tensor
    return all(t.tensor.ndim == first.ndim and t.tensor.shape[1] == first.shape[1] for t in tensors)


@rule(
    "mean", "sum", "prod", "amax", "amin", "var", "std", "max", "min", "argmax", "argmin", "any", "all", "logsumexp",
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "linalg_vector_norm", "transpose",
    "permute", "movedim", "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "cat", "concat",
    "concatenate", "stack", "flip", "roll", "gather", "sort", "topk", "glu", "var_mean", "std_mean",
)  # fmt: skip
def dimensional(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run in STACK with every dimension moved by one; without a dimension, over all but the first."""
    named = arguments_by_name(call, args, kwargs)
    name = base_name(call.target)
    if _stays_in_channels(name, named):
        return _in_channels(call, named)
    dimensions = [key for key in _DIMENSIONS if key in named]
    if not dimensions:
        return _over_everything(call, name, named)
    ranks = [rank_of(value) for value in values_in(list(named.values())) if isinstance(value, Fused)]
    if name in ("cat", "concat", "concatenate") and len(set(ranks)) > 1:
        raise NotFusedError  # an empty vector, which torch leaves out
    rank = ranks[0] + (name == "stack")  # its dimension is one of the result
    if not rank:
        raise NotFusedError  # a scalar accepts dimension -1, although it has none
    for key in dimensions:
        named[key] = _shifted(name, named[key], rank)
    plain = {key: map_values(value, call.stack) for key, value in named.items()}
    return wrap(run(call.functional, plain), Layout.STACK)


def _shifted(name: str, dims: Any, rank: int) -> Any:
    if name == "permute":
        return [0, *(dim % rank + 1 for dim in dims)]
    if dims is None or dims == []:
        if name not in _ANY_DIMENSIONS:
            raise NotFusedError
        return list(range(1, rank + 1))
    if isinstance(dims, list | tuple):
        return [dim % rank + 1 for dim in dims]
    return dims % rank + 1


def _over_everything(call: Call, name: str, named: dict[str, Any]) -> Fused:
    """Reduce over everything but K, with each learner's values as one row."""
    if name not in {"mean", "sum", "prod", "max", "min", "any", "all"}:
        raise NotFusedError
    own = call.stack(named["self"]).reshape(call.num_learners, -1)
    name = {"max": "amax", "min": "amin"}.get(name, name)
    keywords = {"dtype": named["dtype"]} if named.get("dtype") is not None else {}
    return Fused(getattr(torch, name)(own, dim=1, **keywords), Layout.STACK)


def _stays_in_channels(name: str, named: Mapping[str, Any]) -> bool:
    """Return whether it concatenates channels or reduces over space, which needs no change of layout."""
    if name in {"cat", "concat", "concatenate"}:
        values = values_in(list(named.values()))
        return named["dim"] == 1 and all(isinstance(v, Fused) and v.layout is Layout.CHANNELS for v in values)
    own, dims = named.get("self"), named.get("dim")
    if name not in {"mean", "sum", "amax", "amin"} or not isinstance(own, Fused) or not isinstance(dims, list):
        return False
    return own.layout is Layout.CHANNELS and bool(dims) and all(dim % own.tensor.ndim > 1 for dim in dims)


def _in_channels(call: Call, named: dict[str, Any]) -> Fused:
    if "tensors" in named:
        own = [value.tensor for value in named["tensors"]]
        if own[0].ndim == 4:  # in memory order, so that the result is channels-last without another copy
            split = [split_learners(tensor.movedim(1, -1), -1, call.num_learners) for tensor in own]
            return Fused(torch.cat(split, dim=-1).flatten(-2).movedim(-1, 1), Layout.CHANNELS)
        split = [split_learners(tensor, 1, call.num_learners) for tensor in own]
        return Fused(torch.cat(split, dim=2).flatten(1, 2), Layout.CHANNELS)
    return Fused(run(call.functional, {**named, "self": named["self"].tensor}), Layout.CHANNELS)


@rule("t", "mT")
def transposed(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Transpose matrices, and leave vectors."""
    own = call.stack(args[0])
    return Fused(own.transpose(-2, -1) if own.ndim > 2 else own, Layout.STACK)


@rule("index_select")
def index_select(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Select with an index that all learners share."""
    own, dim, index = args
    if index.layout is not Layout.SHARED:
        raise NotFusedError
    return Fused(call.stack(own).index_select(dim + 1 if dim >= 0 else dim, index.tensor), Layout.STACK)


@rule("index")
def index(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Index with the indexed dimensions first; if learners have different indices, K is indexed too."""
    own, given = call.stack(args[0]), args[1]
    dims = [dim for dim, each in enumerate(given) if each is not None]
    indices = [given[dim] for dim in dims]
    if any(each.tensor.dtype in (torch.bool, torch.uint8) for each in indices):
        raise NotFusedError
    rank = max(rank_of(each) for each in indices)
    first: list[Tensor | None] = [None]
    if any(each.layout is not Layout.SHARED for each in indices):
        learners = torch.arange(call.num_learners, device=own.device)
        first = [learners.view(-1, *(1,) * rank)]
        tensors = [with_rank(call.stack(each), rank) for each in indices]
    else:
        tensors = [each.tensor for each in indices]
    moved = own.movedim([dim + 1 for dim in dims], list(range(1, len(dims) + 1)))
    found = torch.ops.aten.index.Tensor(moved, [*first, *tensors])
    if dims[-1] - dims[0] == len(dims) - 1:  # adjacent dimensions, which the result replaces
        found = found.movedim(list(range(1, rank + 1)), list(range(dims[0] + 1, dims[0] + rank + 1)))
    return Fused(found, Layout.STACK)


@rule("contiguous", "alias", "lift_fresh_copy")
def unchanged(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the value: rules choose memory formats."""
    return args[0]


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"
)
def reshape(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Change the shape to the exported one, after K."""
    assert call.shape is not None, "a change of shape gives a tensor"
    own = call.stack(args[0])
    return Fused(own.reshape(call.num_learners, *call.shape), Layout.STACK)


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Expand to the exported shape, after K, without a copy."""
    assert call.shape is not None, "an expansion gives a tensor"
    own = with_rank(call.stack(args[0]), len(call.shape))
    return Fused(own.expand(call.num_learners, *call.shape), Layout.STACK)


@rule("repeat")
def repeat(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Repeat every dimension but K."""
    own, sizes = args
    return Fused(with_rank(call.stack(own), len(sizes)).repeat(1, *sizes), Layout.STACK)


@rule("pad", "constant_pad_nd")
def pad(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Pad space in any layout; in STACK also channels and the batch, with a constant."""
    named = arguments_by_name(call, args, kwargs)
    own, widths = named["self"], named["pad"]
    spatial = len(widths) // 2 <= rank_of(own) - 2
    layout = Layout.CHANNELS if spatial and own.layout is Layout.CHANNELS else Layout.STACK
    if named.get("mode", "constant") != "constant":  # other modes pad only images
        if len(widths) // 2 != rank_of(own) - 2:
            raise NotFusedError  # without a batch
        layout = Layout.CHANNELS
    named["self"] = call.channels(own) if layout is Layout.CHANNELS else call.stack(own)
    return Fused(run(call.functional, named), layout)


def add_to_integer_buffers(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `num_batches_tracked += 1` on every learner's own module."""
    own: PerLearner = args[0]
    if kwargs or isinstance(args[1], Fused | PerLearner):
        raise NotFusedError
    torch._foreach_add_(own.tensors, args[1])
    return own
