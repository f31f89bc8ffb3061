"""The model that a run begins with: initialised from the seed, checked, and copied faithfully."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, call, in_format, map_tree
from crossbow_py.data.build import make_feed
from crossbow_py.data.datasets import Data, num_samples, take
from crossbow_py.data.feed import Batch
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.modules.dropout import without_dropout
from crossbow_py.engine.modules.precision import Precision, cast_module
from crossbow_py.engine.trust import compare
from crossbow_py.train.checkpoints.weights import load_weights

MakeModel = Callable[[], nn.Module]

_APART = 0.02  # relative distance by which weights are moved before a copy is compared
# A ReLU that stands at its kink by these very weights falls either way; a model that differs does so by others too.
_TRIES = 2
_MOST_FIRST = 2000  # samples that a model is initialised from


def seeded_model(make_model: MakeModel, seed: int, init_from: str | None) -> nn.Module:
    """Return a model whose initialisation depends only on the seed. Torch's generators are restored.

    Raises UserError if it is not a module with parameters to train, or one whose shapes are not known yet.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise UserError(
            f"model must be a function that returns an nn.Module, got {type(make_model).__name__}; "
            "give the class itself or a lambda."
        )
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        module = make_model()
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model must be a function that returns an nn.Module, got {type(module).__name__} from it; "
            "have it return the model."
        )
    _check_tensors(module)
    if init_from is not None:
        load_weights(module, init_from)
    try:
        return module.train()  # some models freeze a part of themselves there
    except Exception as error:
        raise UserError(
            f"the model cannot be set to train ({one_line(error)}); return the nn.Module itself, not what was exported."
        ) from error


def initialising(
    make_model: MakeModel, data: Data, mean: Sequence[float] | None, std: Sequence[float] | None,
    places: npt.NDArray[np.int64] | None = None,
) -> MakeModel:  # fmt: skip
    """Return a function that makes the models of `make_model`, those with `initialise_from` initialised from the data.

    The method gets inputs as in training, but not augmented, in float32 on the host: at most `_MOST_FIRST` samples,
    evenly spread over the training data, or over the samples `places` of these.
    """

    def make() -> nn.Module:
        module = make_model()
        if callable(initialise := getattr(module, "initialise_from", None)):
            initialise(_spread_inputs(data, mean, std, places))
        return module

    return make if callable(make_model) and not isinstance(make_model, nn.Module) else make_model


def _spread_inputs(
    data: Data, mean: Sequence[float] | None, std: Sequence[float] | None, places: npt.NDArray[np.int64] | None
) -> Tree:
    ids = np.arange(num_samples(data)) if places is None else places
    ids = ids[np.linspace(0, len(ids) - 1, min(len(ids), _MOST_FIRST)).astype(np.int64)]
    feed = make_feed(take(data, ids), 1, mean=mean, std=std)
    try:
        return feed.first_samples(len(ids)).inputs
    finally:
        feed.close()


def remarks_on_starts(model: nn.Module, other: nn.Module) -> list[str]:
    """Return a warning if models of two seeds begin with the same weights, as one that was made before does."""
    if not all(torch.equal(*pair) for pair in zip(_on_host(model), _on_host(other), strict=False)):
        return []
    return [
        "Models of different seeds begin with the same weights: make the model inside the function `model`, if they "
        "are to begin apart."
    ]


def _on_host(module: nn.Module) -> Iterator[Tensor]:
    return (parameter.detach().cpu() for parameter in module.parameters())


def _check_tensors(module: nn.Module) -> None:
    """Raise UserError for parameters and buffers that a bank cannot hold, or if there is nothing to train."""
    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        if value.is_meta:
            raise UserError(
                f"the model's {name} is on the device meta, and has no values; make the model elsewhere, or call "
                "to_empty(device='cpu') and initialise it."
            )
        if is_lazy(value):
            raise UserError(
                f"the model's {name} has no shape yet, as a lazy module gets one from its first batch; run the model "
                "on one where it is made, before it is returned: model(torch.zeros(2, ...))."
            )
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise UserError(
                f"the model's buffer {name} is sparse, and learners' buffers are dense; register buffer.to_dense(), or "
                "keep what never changes as an attribute."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("the model has no parameter to train; give it some, or set requires_grad.")
    if shared := _overlap(module):
        raise UserError(
            f"the model's {shared[0]} and {shared[1]} share memory, but a learner stores each of its weights "
            "separately; give both names one nn.Parameter, or compute one from the other in forward."
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise UserError for values that only the parameter's own class can read, and for complex ones."""
    if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__ or (
        type(parameter) is not nn.Parameter and not parameter.is_floating_point()
    ):
        raise UserError(
            f"the model's {name} is quantized ({type(parameter).__name__}), and learners hold plain tensors; load "
            "the base without quantization, as in from_pretrained(..., dtype=torch.bfloat16), or dequantize it."
        )
    if parameter.is_complex():
        raise UserError(
            f"the model's {name} is complex, and learners' weights are real; keep torch.view_as_real of it as the "
            "parameter, and take torch.view_as_complex in forward."
        )


def _overlap(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters, or of a parameter and a buffer, that share memory; None if there are none."""
    parameters = {id(own) for own in module.parameters()}
    extents = []
    for name, own in itertools.chain(module.named_parameters(), module.named_buffers()):
        if own.numel():
            extents.append((own.data_ptr(), _end(own), name, own))
    extents.sort(key=lambda extent: extent[:3])
    open_extents: list[tuple[int, str, Tensor]] = []  # that begin before the current one: their ends
    for first, end, name, own in extents:
        open_extents = [extent for extent in open_extents if extent[0] > first]
        for _, other, before in open_extents:
            if (id(own) in parameters or id(before) in parameters) and _share(own, before):
                return min(other, name), max(other, name)
        open_extents.append((end, name, own))
    return None


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors whose extents overlap share a byte; two columns of one matrix do not."""
    if one.device != other.device:
        return False
    first, covered = min(one.data_ptr(), other.data_ptr()), list[Tensor]()
    flags = torch.zeros(max(map(_end, (one, other))) - first, dtype=torch.bool)
    for own in (one, other):
        size, dims = own.element_size(), [*zip(own.shape, own.stride(), strict=True)]
        shape, steps = [count if step else 1 for count, step in dims], [step * size for _, step in dims]
        covered.append(flags.as_strided([*shape, size], [*steps, 1], own.data_ptr() - first))
    covered[0].fill_(True)
    return bool(covered[1].any())


def _end(own: Tensor) -> int:
    """Return the address after a tensor's last byte."""
    extent = 1 + sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
    return own.data_ptr() + extent * own.element_size()


def faithful_copy(original: nn.Module, precision: Precision, batch: Batch, channels_last: bool) -> nn.Module:
    """Return a copy of the model, after checking that learners, which are copies, train as the model itself does.

    A learner in a bank's row, with weights that were moved, is compared with the model: output, gradients and buffers.
    A copy loses hooks on parameters, and functions that hold the model itself still use it instead of the copy.

    Args:
        original: the model as it was made; its weights and buffers are restored.
        precision: the formats of the run.
        batch: a small batch that the model can take.
        channels_last: whether 4-D weights are in channels-last format.

    Raises:
        UserError: learners would train differently from the model.
    """
    hooked = [
        name
        for name, own in original.named_parameters()
        if own._backward_hooks or getattr(own, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise UserError(
            f"the model's {hooked[0]} has a hook on its gradient, which learners, copies of the model, would lose; "
            "write what it does into forward, as for a mask: (weight * mask) in place of weight."
        )
    copied = copy.deepcopy(original)
    own = {id(parameter) for parameter in original.parameters()}
    if shared := [name for name, parameter in copied.named_parameters() if id(parameter) in own]:
        raise UserError(
            f"a copy of the model shares {shared[0]} with it, and every learner needs its own; let __deepcopy__ copy "
            "parameters."
        )
    try:
        try:
            found = _difference(original, copied, replace(precision, compute=precision.master), batch, channels_last)
        except Exception:  # it may accept only the run's own format
            if not precision.has_shadow:
                raise
            found = _difference(original, copied, precision, batch, channels_last)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"the model's gradients cannot be computed ({one_line(error)[:300]}); compute them once yourself, by "
            "torch.autograd.grad(loss, parameters), and fix what fails."
        ) from error
    if found is not None:
        raise UserError(
            f"learners, copies of the model, would not train as it does ({found}); no hook, lambda or other tensor of "
            "the model may hold the model itself or memory of its weights; take them from self when forward runs."
        )
    return copied


def _difference(
    original: nn.Module, copied: nn.Module, precision: Precision, batch: Batch, channels_last: bool
) -> compare.Difference | None:
    """Return where a learner in a bank's row, with weights that were moved, differs from the model itself."""
    bank = ReplicaBank(
        copied, 1, device=batch.targets.device, precision=precision, state_names=(),
        channels_last=channels_last, training=False,
    )  # fmt: skip
    learner, trained = bank.module(0), [name for name, own in original.named_parameters() if own.requires_grad]
    inputs = in_format(batch.inputs, precision.compute)

    drawn: list[bool] = []

    def values(model: nn.Module) -> dict[str, Tensor]:
        # Contiguous inputs for the original show a forward that depends on strides. Not if it draws: random numbers are
        # drawn in memory order.
        own = map_tree(Tensor.contiguous, inputs) if model is original and not any(drawn) else inputs
        with kept_generators(batch.targets.device), compare.kept_buffers(model), without_dropout(model.train()):
            torch.manual_seed(0)
            before = torch.random.get_rng_state()
            found = compare.gradients_of(compare.projection(call(model, own)), model, trained)
            drawn.append(not torch.equal(before, torch.random.get_rng_state()))
            return found

    def control() -> dict[str, Tensor]:
        with compare.moved_weights(list(original.parameters()), precision.compute):
            return values(original)

    found = None
    with _borrowed(original, bank.precision):
        for _ in range(_TRIES):
            compare.move(list(learner.parameters()), _APART)
            _load(original, dict(learner.named_parameters()))
            found = compare.furthest(values(learner), values(original), control, precision.compute)
            if found is None:
                break
    return found


@contextlib.contextmanager
def _borrowed(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Cast a model to another format in the block, which may write its weights; then restore both."""
    tensors = [(own, own.data) for own in (*model.parameters(), *model.buffers())]
    weights = {name: own.detach().clone() for name, own in model.named_parameters()}
    cast_module(model, precision)
    try:
        yield
    finally:
        for own, data in tensors:
            own.data = data
        _load(model, weights)


@torch.no_grad()
def _load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, own in model.named_parameters():
        own.copy_(values[name])
