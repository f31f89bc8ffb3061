"""Rules for layers: convolution, normalisation, linear, embedding, attention and pooling."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.engine.fusion.rules.registry import Call, NotFusedError, arguments_by_name, base_name, rule, run
from crossbow_py.engine.fusion.values import Fused, Layout, folds, rank_of, split_learners, with_rank, wrap
from crossbow_py.engine.modules.dropout import take_masks


def _flat(call: Call, value: Fused | None) -> Tensor | None:
    """Return parameters or statistics `[K, C, ...]` as `[K·C, ...]`, a view in a bank of blocks."""
    return None if value is None else call.stack(value).flatten(0, 1)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one grouped convolution, or for a shared input one dense convolution with K times the outputs.

    With shared filters it is one convolution of K times the images.
    """
    named = arguments_by_name(call, args, kwargs)
    weight, own = named["weight"], named["input"]
    if weight.layout is Layout.CHANNELS or rank_of(own) != rank_of(weight):
        raise NotFusedError  # filters are no parameters, or images have no batch
    if weight.layout is Layout.SHARED:
        return _with_shared_filters(call, named)
    named["weight"], named["bias"] = _flat(call, weight), _flat(call, named["bias"])
    transposed = "output_padding" in named
    if own.layout is Layout.SHARED and named["groups"] == 1 and not transposed and not _is_thin(own.tensor):
        named["input"] = own.tensor
    else:
        named["input"] = call.channels(own)
        named["groups"] *= call.num_learners
    return Fused(run(call.target, named), Layout.CHANNELS)


def _with_shared_filters(call: Call, named: dict[str, Any]) -> Fused:
    own, weight, bias = named["input"], named["weight"], named["bias"]
    is_shared = all_shared(bias)
    shift = bias.tensor if bias and is_shared else None
    if own.layout is Layout.SHARED:
        found = run(call.target, {**named, "input": own.tensor, "weight": weight.tensor, "bias": shift}).unsqueeze(0)
    else:
        found = _folded(call, {**named, "weight": weight.tensor, "bias": shift}, "input").tensor
    if not is_shared:
        found = found + call.stack(bias)[(slice(None), None, slice(None), *(None,) * (found.ndim - 3))]
    return Fused(found, Layout.STACK)


def _folded(call: Call, named: dict[str, Any], key: str) -> Fused:
    """Run an operator whose other arguments are shared on the samples of all learners, `[K·B, ...]`."""
    values = call.stack(named[key]).flatten(0, 1)
    if values.ndim == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    result = run(call.target, {**named, key: values})
    return Fused(split_learners(result, 0, call.num_learners), Layout.STACK)


def all_shared(*values: Fused | None) -> bool:
    """Return whether all learners have the same values, as far as there are some."""
    return all(value is None or value.layout is Layout.SHARED for value in values)


def _tensors(named: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return these arguments, which are shared, as tensors."""
    return {name: None if named[name] is None else named[name].tensor for name in names}


def _is_thin(images: Tensor) -> bool:
    """Return whether dense filter gradients are slow: for images of one channel on a CPU without AVX-512.

    The first layer of LeNet for 16 learners, batches of 32, both directions, on one core of an AMD EPYC with AVX2,
    takes 2.7 to 3.3 ms a learner dense and 1.8 to 1.9 ms grouped (shortest of 25). With AVX-512 it is 0.3 dense and 1.1
    grouped in bfloat16, 0.6 and 1.0 in float32. With three channels dense is faster in any case.
    """
    is_short = images.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return is_short and images.ndim == 4 and images.shape[1] == 1


@rule("batch_norm", "instance_norm")
def batch_norm(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Normalise K·C channels, and update the bank's statistics in place; with shared ones, K times the samples.

    With a shared scale and shift, each learner's samples are normalised where they are, without a copy.
    """
    named = arguments_by_name(call, args, kwargs)
    shared = ("weight", "bias", "running_mean", "running_var")
    by_batch = named["training"] if "training" in named else named["use_input_stats"] and named["running_mean"]
    if not by_batch and all_shared(*(named[name] for name in shared)) and named["input"].layout is Layout.STACK:
        return _folded(call, named | _tensors(named, *shared), "input")
    if base_name(call.target) == "batch_norm" and by_batch and _is_normalised_in_place(named):
        own, momentum, eps = call.stack(named["input"]), named["momentum"], named["eps"]
        means, variances = named["running_mean"], named["running_var"]
        statistics = [None if each is None else call.stack(each) for each in (means, variances)]
        given = *_tensors(named, "weight", "bias").values(), *statistics, momentum, eps
        return Fused(_NormOfLearners.apply(own, *given), Layout.STACK)  # type: ignore[no-untyped-call]
    named["input"] = call.channels(named["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        named[name] = _flat(call, named[name])
    return Fused(run(call.target, named), Layout.CHANNELS)


def _is_normalised_in_place(named: Mapping[str, Any]) -> bool:
    """Return whether learners are best normalised one by one: on CPUs, where samples of each lie together."""
    own, scales = named["input"], (named["weight"], named["bias"])
    together = own.tensor.device.type == "cpu" and folds(own)
    return together and all_shared(*scales)


class _NormOfLearners(torch.autograd.Function):
    """BatchNorm of `[K, B, C, ...]` by each learner's own statistics, with one scale and shift `[C]`."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor | None,
        variances: Tensor | None, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """Return normalised values, and update running statistics `[K, C]` in place."""
        if not _is_end_to_end(own[0]):  # torch writes no other results
            own = own.contiguous()
        kind = torch.promote_types(own.dtype, torch.float32)
        result, saved = torch.empty_like(own), own.new_empty(2, len(own), own.shape[2], dtype=kind)
        for j, each in enumerate(own):
            statistics = [None if rows is None else rows[j] for rows in (means, variances)]
            out = {"out": result[j], "save_mean": saved[0, j], "save_invstd": saved[1, j]}
            torch.ops.aten.native_batch_norm.out(each, weight, bias, *statistics, True, momentum, eps, **out)
        ctx.save_for_backward(own, weight, saved)
        ctx.eps = eps
        return result

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values, scale and shift."""
        (gradient,), (own, weight, saved) = outputs, ctx.saved_tensors
        needs, sums = ctx.needs_input_grad[:3], list[tuple[Tensor, ...]]()
        whole = torch.empty_like(own) if needs[0] else None
        for j, each in enumerate(own):
            of_values, *others = torch.ops.aten.native_batch_norm_backward(
                gradient[j], each, weight, None, None, *saved[:, j], True, ctx.eps, needs
            )
            if whole is not None:
                whole[j].copy_(of_values)  # while it is in the cache
            sums.append(tuple(others))
        needed = zip(zip(*sums, strict=True), needs[1:], strict=True)
        return whole, *(torch.stack(each).sum(0) if is_needed else None for each, is_needed in needed), *[None] * 4


def _is_end_to_end(samples: Tensor) -> bool:
    """Return whether samples `[B, C, ...]` fill their memory in order, or channels-last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(samples.ndim, torch.contiguous_format)
    return samples.is_contiguous() or samples.is_contiguous(memory_format=last)


@rule("group_norm")
def group_norm(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Normalise K times as many groups."""
    named = arguments_by_name(call, args, kwargs)
    if all_shared(named["weight"], named["bias"]) and named["input"].layout is Layout.STACK:
        folded = call.stack(named["input"]).flatten(0, 1).contiguous()
        result = run(call.target, named | _tensors(named, "weight", "bias") | {"input": folded})
        return Fused(split_learners(result, 0, call.num_learners), Layout.STACK)
    own = call.channels(named["input"])
    # torch 2.13 crashes in the backward pass of a channels-last input that does not require a gradient.
    named["input"] = own if own.requires_grad else own.contiguous()
    named["num_groups"] *= call.num_learners
    for name in ("weight", "bias"):
        named[name] = _flat(call, named[name])
    return Fused(run(call.target, named), Layout.CHANNELS)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Normalise all rows without parameters, and then apply each learner's scale and shift."""
    named = arguments_by_name(call, args, kwargs)
    own, weight, bias = call.stack(named["input"]), named["weight"], named.get("bias")
    if all_shared(weight, bias):
        names = ("weight", "bias") if "bias" in named else ("weight",)
        return Fused(run(call.target, named | _tensors(named, *names) | {"input": own}), Layout.STACK)
    rank = own.ndim - 1
    plain = {**named, "input": own, "weight": None} | ({"bias": None} if "bias" in named else {})
    result = run(call.target, plain)
    if weight is not None:
        result = result * with_rank(call.stack(weight), rank)
    if bias is not None:
        result = result + with_rank(call.stack(bias), rank)
    return Fused(result, Layout.STACK)


@rule("linear")
def linear(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute one batched product; for a shared input with K times the outputs, for shared weights K times the rows."""
    named = arguments_by_name(call, args, kwargs)
    own, weight, bias = named["input"], named["weight"], named["bias"]
    if weight.layout is Layout.SHARED:
        rows = own.tensor.unsqueeze(0) if own.layout is Layout.SHARED else call.stack(own)
        found = nn.functional.linear(rows, weight.tensor, bias.tensor if bias and all_shared(bias) else None)
        if not all_shared(bias):
            return Fused(found + with_rank(call.stack(bias), found.ndim - 1), Layout.STACK)
        return Fused(found[0], Layout.SHARED) if own.layout is Layout.SHARED else Fused(found, Layout.STACK)
    weights = call.stack(weight)
    if own.layout is Layout.SHARED:
        wide = nn.functional.linear(own.tensor, weights.flatten(0, 1), _flat(call, bias))
        return Fused(split_learners(wide, -1, call.num_learners).movedim(-2, 0), Layout.STACK)
    rows = call.stack(own)
    flat = rows.reshape(call.num_learners, -1, rows.shape[-1])
    shift = None if bias is None else call.stack(bias)
    result: Tensor = _BatchedLinear.apply(flat, weights, shift)  # type: ignore[no-untyped-call]
    return Fused(result.reshape(*rows.shape[:-1], -1), Layout.STACK)


class _BatchedLinear(torch.autograd.Function):
    """x·Wᵀ + b for every learner. Unlike in torch's own, the gradient of W has the memory order of W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        """Return `[K, N, O]` from rows `[K, N, I]`, weights `[K, O, I]` and bias `[K, O]`."""
        ctx.save_for_backward(rows, weights)
        ctx.has_bias = bias is not None
        turned = weights.transpose(1, 2)
        return torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are needed."""
        (gradient,), (rows, weights) = outputs, ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        return (
            torch.bmm(gradient, weights) if needs_rows else None,
            torch.bmm(gradient.transpose(1, 2), rows) if needs_weights else None,
            gradient.sum(1) if ctx.has_bias else None,
        )


@rule("addmm", "baddbmm")
def product_and_sum(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a batched product and sum for all learners."""
    assert call.shape is not None, "a product is a tensor"
    if all_shared(args[2]) and len(call.shape) == 2 and not kwargs:
        found = torch.matmul(call.stack(args[1]), args[2].tensor)
        return Fused(found + with_rank(call.stack(args[0]), 2), Layout.STACK)
    shift, left, right = (with_rank(call.stack(value), len(call.shape)) for value in args)
    whole = shift.expand(call.num_learners, *call.shape)
    found = torch.baddbmm(*(value.flatten(0, -3) for value in (whole, left, right)), **kwargs)
    return Fused(found.view(call.num_learners, *call.shape), Layout.STACK)


@rule("matmul", "mm", "bmm")
def matmul(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a product with one more batch dimension. The loop runs products of vectors."""
    rank = max(rank_of(value) for value in args)
    if min(rank_of(value) for value in args) < 2:
        raise NotFusedError
    left, right = (value.tensor if all_shared(value) else with_rank(call.stack(value), rank) for value in args)
    return Fused(torch.matmul(left, right), Layout.STACK)


@rule("einsum")
def einsum(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put a letter for K before the terms that differ by learner. The loop runs equations without `->`."""
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    learner = next(letter for letter in ascii_letters if letter not in args[0])
    terms = inputs.split(",")
    if not arrow or len(terms) != len(args[1]):
        raise NotFusedError
    shared = [value.layout is Layout.SHARED for value in args[1]]
    terms = [term if same else learner + term for term, same in zip(terms, shared, strict=True)]
    tensors = [
        value.tensor if same else call.stack(value) for value, same in zip(args[1], shared, strict=True)
    ]
    return Fused(call.target(f"{','.join(terms)}->{learner}{output}", tensors, **kwargs), Layout.STACK)


@rule("embedding")
def embedding(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Look up in one table of K·V rows, in which learner j's begin at j·V."""
    named = arguments_by_name(call, args, kwargs)
    if named["weight"].layout is Layout.SHARED:
        if named["scale_grad_by_freq"]:  # in each learner's batch
            raise NotFusedError
        shared = named | _tensors(named, "weight") | {"indices": call.stack(named["indices"])}
        return Fused(run(call.target, shared), Layout.STACK)
    table, indices = call.stack(named["weight"]), call.stack(named["indices"])
    # An index beyond a learner's table would read its neighbour's. On CUDA the device checks, without a wait.
    within = (indices >= 0) & (indices < table.shape[1])
    torch._assert_async(within.all(), f"an index is not in the {table.shape[1]} rows of an embedding")
    first = torch.arange(call.num_learners, device=table.device) * table.shape[1]
    found = nn.functional.embedding(
        with_rank(first, indices.ndim - 1) + indices,
        table.flatten(0, 1),
        scale_grad_by_freq=named["scale_grad_by_freq"],
    )
    if named["padding_idx"] >= 0:  # a row that is read but not trained
        found = torch.where((indices == named["padding_idx"]).unsqueeze(-1), found.detach(), found)
    return Fused(found, Layout.STACK)


@rule("scaled_dot_product_attention")
def attention(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run with learners as part of the batch; with dropout as torch does on a CPU, with each learner's own masks."""
    named = arguments_by_name(call, args, kwargs)
    mask, p = named["attn_mask"], named["dropout_p"]
    if rank_of(named["query"]) < 3 or p == 1 or (named["scale"] or 1) < 0:
        raise NotFusedError
    if mask is not None and (mask.layout is not Layout.SHARED or mask.tensor.ndim > 2):
        batched = with_rank(call.stack(mask), rank_of(named["query"]))
        sizes = (call.num_learners, call.stack(named["query"]).shape[1], *batched.shape[2:])
        named["attn_mask"] = batched.expand(sizes).flatten(0, 1)
    elif mask is not None:
        named["attn_mask"] = mask.tensor
    for name in ("query", "key", "value"):
        named[name] = call.stack(named[name]).flatten(0, 1)
    if p == 0:
        return Fused(split_learners(run(call.target, named), 0, call.num_learners), Layout.STACK)
    query = split_learners(named["query"], 0, call.num_learners)
    shape, generators = (*query.shape[1:-1], named["key"].shape[-2]), call.generators
    kept = take_masks(shape, [p] * call.num_learners, generators, query)
    return Fused(split_learners(_attention_with_dropout(named, kept.flatten(0, 1)), 0, call.num_learners), Layout.STACK)


def _attention_with_dropout(named: Mapping[str, Any], kept: Tensor) -> Tensor:
    """Return softmax(q·kᵀ·scale + mask)·kept·v, computed in the order of torch on a CPU."""
    query, key, value, mask = (named[name] for name in ("query", "key", "value", "attn_mask"))
    if named["enable_gqa"]:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    root = (query.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if named["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = torch.ops.aten._safe_softmax(scores, -1)  # zeros for rows that are masked completely
    result: Tensor = (weights * kept) @ value
    return result


@rule("cross_entropy_loss")
def cross_entropy(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Take each sample's loss in one call, and each learner's mean or sum."""
    named = arguments_by_name(call, args, kwargs)
    scores, labels, reduction, count = named["self"], named["target"], named["reduction"], call.num_learners
    if named["weight"] is not None or labels.tensor.is_floating_point() or (rank_of(scores), rank_of(labels)) != (2, 1):
        raise NotFusedError
    flat, none = call.stack(labels).flatten(), 0  # as torch numbers reductions: none, mean, sum
    each = run(call.target, {**named, "self": call.stack(scores).flatten(0, 1), "target": flat, "reduction": none})
    each = split_learners(each, 0, count)
    if reduction == none:
        return Fused(each, Layout.STACK)
    counted = split_learners(flat != named["ignore_index"], 0, count).sum(1)
    return Fused(each.sum(1) / counted if reduction == 1 else each.sum(1), Layout.STACK)


_POOLING = [
    f"{kind}{dims}d{suffix}"
    for kind, suffix in (
        ("max_pool", ""), ("max_pool", "_with_indices"), ("avg_pool", ""), ("adaptive_avg_pool", ""),
        ("adaptive_max_pool", ""), ("lp_pool", ""),
    )
    for dims in (1, 2, 3)
]  # fmt: skip


@rule(
    *_POOLING, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d", "upsample_bicubic2d",
    "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "replication_pad2d", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "im2col",
)  # fmt: skip
def channelwise(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that treats all channels equally on K·C channels."""
    name = base_name(call.target)
    if rank_of(args[0]) != 2 + next((int(letter) for letter in name if letter.isdigit()), 2):
        raise NotFusedError  # an image without a batch
    if folds(args[0]):
        result = call.target(args[0].tensor.flatten(0, 1), *args[1:], **kwargs)
        parts = [result] if isinstance(result, Tensor) else result
        found = [Fused(split_learners(part, 0, call.num_learners), Layout.STACK) for part in parts]
        return found[0] if isinstance(result, Tensor) else found
    result = call.target(call.channels(args[0]), *args[1:], **kwargs)
    return wrap(result, Layout.CHANNELS)


@rule("prelu")
def prelu(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a slope for every channel, or one for all channels of a learner."""
    own, slopes = args
    if rank_of(own) < 2:
        raise NotFusedError  # a vector without a batch
    if all_shared(slopes) and folds(own):
        return _folded(call, {"self": own, "weight": slopes.tensor}, "self")
    values = call.channels(own)
    each = call.stack(slopes).expand(-1, values.shape[1] // call.num_learners)
    return Fused(call.target(values, each.flatten(0, 1)), Layout.CHANNELS)
