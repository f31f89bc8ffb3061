"""The least work of training: FLOPs, bytes and kernels, counted operator by operator.

A learner's step (forward, loss, backward) is counted on fake tensors, so no device and no time is needed. Kernels of a
fused round are counted in a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.modules.precision import Precision, PrecisionName, cast_module, choose_precision
from experiments.bench.rounds import Rounds, Setup, build_model, input_shape

# Places of arguments that are read twice: those whose sums are needed before the first output can be written, and the
# gradient of a convolution's output, from which two kernels make the gradients of its input and of its weight.
_READ_TWICE = {"native_batch_norm": (0,), "native_batch_norm_backward": (0, 1), "convolution_backward": (0,)}
# Allocations, and numbers for the host.
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_local_scalar_dense")
_ONLY_WRITES = ("copy_", "fill_", "zero_")  # what they are given first
# Not point-wise by torch's tags, and as easily done by the kernel before or after.
_MOVES = ("clone", "copy_", "_to_copy", "cat", "constant_pad_nd", "slice_backward", "fill_", "zero_", "ones_like")
# A whole fused round is counted with the third learner's share known from these, as K banks of a large model are large.
_FEW, _MORE = 2, 3
_BATCH_OF_COUNTED_ROUNDS = 2
# In the first round every operator looks for its rule; with CUDA graphs the third is captured.
_COUNTED_ROUND = 1


@dataclass(frozen=True)
class StepCounts:
    """One learner's step over a batch of B images.

    Attributes:
        flops: of convolutions and matrix products, a multiplication and an addition being two.
        operator_bytes: every operator reads its inputs from memory and writes its outputs there.
        fused_bytes: the same without point-wise operators, as they can be part of their neighbours.
        num_kernels: at least so many launches: operators but views, a convolution's gradients one each.
        num_parameters: P.
    """

    flops: int
    operator_bytes: int
    fused_bytes: int
    num_kernels: int
    num_parameters: int


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs under it: launches, and bytes that go through memory with and without point-wise operators.

    Free are views (results that lie in their arguments' memory and change nothing), allocations, and numbers that the
    host reads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_kernels = self.operator_bytes = self.fused_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, inputs, outputs = func._opname, _tensors([*args, kwargs]), _tensors(result)
        memory = {_storage(tensor) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(_storage(tensor) in memory for tensor in outputs)
        if is_view or name in _FREE:
            return result
        self.num_kernels += _num_kernels(name, args)
        moved = sum(_num_bytes(tensor) for tensor in [*inputs[name in _ONLY_WRITES :], *outputs])
        moved += sum(_num_bytes(args[place]) for place in _READ_TWICE.get(name, ()))
        self.operator_bytes += moved
        if torch.Tag.pointwise not in func.tags and name not in _MOVES:
            self.fused_bytes += moved
        return result


@cache
def count_step(model: str, batch_size: int, precision: PrecisionName) -> StepCounts:
    formats = choose_precision(precision, torch.device("cpu"))
    return count_step_of(partial(build_model, model), input_shape(model), batch_size, formats)


def count_step_of(
    make_model: Callable[[], nn.Module], shape: Sequence[int], batch_size: int, precision: Precision
) -> StepCounts:
    with FakeTensorMode():
        module = cast_module(make_model(), precision).train()
        inputs = torch.empty(batch_size, *shape, dtype=precision.compute)
        targets = torch.zeros(batch_size, dtype=torch.int64)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with FlopCounterMode(display=False) as flops, OperatorCounter() as counter:
            loss = nn.functional.cross_entropy(module(inputs).to(precision.master), targets)
            torch.autograd.grad(loss, trained, allow_unused=True)
    return StepCounts(
        flops=flops.get_total_flops(),
        operator_bytes=counter.operator_bytes,
        fused_bytes=counter.fused_bytes,
        num_kernels=counter.num_kernels,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def update_bytes(num_learners: int, num_parameters: int, precision: PrecisionName) -> int:
    """The bytes that a round's update moves at least, in one pass over the float32 rows of K learners with momentum.

    Weights, gradients and momentum are read, weights and momentum written: 20 bytes a value and learner; 2 more for a
    bfloat16 shadow; the average model and the one before are read and written: 16 bytes a value, once.
    """
    return ((22 if precision == "bf16" else 20) * num_learners + 16) * num_parameters


def batch_bytes(model: str, batch_size: int, num_learners: int, precision: PrecisionName) -> int:
    """The bytes that making a round's batches moves: bytes are read, values of the compute format written."""
    return num_learners * batch_size * prod(input_shape(model)) * (1 + (2 if precision == "bf16" else 4))


def fused_kernels(setup: Setup) -> int:
    """Launches of one real fused round: torch's operators but views, and Triton kernels.

    Batches have two images; where there are more than three learners, they are counted with two and with three, since a
    learner more adds the same each time: nothing, unless the model has operators without a rule. On CPU the update is
    native code and not counted; on CUDA it is an eager round, as a graph of it is captured.
    """
    counted = replace(setup, executor="fused", batch_size=min(setup.batch_size, _BATCH_OF_COUNTED_ROUNDS))
    if setup.num_learners <= _MORE or setup.device == "cuda":
        return _kernels_of_round(counted)
    few, more = (_kernels_of_round(replace(counted, num_learners=learners)) for learners in (_FEW, _MORE))
    return few + (setup.num_learners - _FEW) * (more - few)


@cache
def _kernels_of_round(setup: Setup) -> int:
    with Rounds(setup) as rounds:
        rounds.run(_COUNTED_ROUND)
        with recorded() as launches, OperatorCounter() as counter:
            rounds.run(1)
    return int(counter.num_kernels) + len(launches)


def _num_kernels(name: str, args: Sequence[Any]) -> int:
    if name != "convolution_backward":
        return 1
    return sum(map(int, args[-1]))  # which gradients are asked for


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _num_bytes(tensor: Tensor) -> int:
    """The bytes of the values in memory: an expanded tensor's are there once."""
    return min(tensor.numel() * tensor.itemsize, int(tensor.untyped_storage().nbytes()))
