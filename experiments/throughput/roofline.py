"""A roofline: how far a measured throughput is from what the device could do at most.

A round of K learners with B images each must do so many FLOPs, move so many bytes and launch so many kernels; the
device does so many a second. The limit is where FLOPs or bytes alone would take all of the time:

    limit = K·B ÷ max(FLOPs of a round ÷ peak FLOP/s, bytes of a round ÷ copy bandwidth)

Bytes are those of the learners' steps with point-wise operators made part of their neighbours (once more with every
operator by itself), of the update and of the batches, as if nothing stayed in a cache from one operator to the next.
Where tensors of a round are small beside the caches, more than 100 % of the limit is possible.

A learner's step (forward, loss, backward) is counted on fake tensors, so no device and no time is needed. Kernels of a
fused round are counted in a real one. Peaks are known for the devices of a small table and measured for others. Which
kernels really run on a GPU, and how long, is in the profiles of experiments/gpu.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

from crossbow_py.core.errors import CrossbowError
from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.modules.precision import Precision, PrecisionName, cast_module, choose_precision
from experiments.bench.rounds import Rounds, Setup, build_model, input_shape
from experiments.tables.markdown import NONE, markdown_table

# Of a part of a device's name: bytes/s of a copy, read and written, and FLOP/s of a matrix product, as measured.
_KNOWN = {"H200": {"bytes_per_s": 4.3e12, "bf16": 790e12}}
_MEASURE_S = 0.2
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # well beyond any cache
_MATRIX_ROWS = {"cpu": 1024, "cuda": 8192}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """The work of a round: FLOPs, and bytes with and without point-wise operators of their own."""

    num_images: int
    flops: float
    fused_bytes: float
    operator_bytes: float


def roofline_of(
    model: str,
    batch_size: int,
    num_learners: int,
    precision: PrecisionName,
    images_per_s: float | None,
    device: str | torch.device,
) -> dict[str, Any]:
    """Work out what a measured cell could have been, as plain values.

    Args:
        model: of the zoo.
        batch_size, num_learners: B and K.
        precision: fp32 or bf16.
        images_per_s: what was measured; None where nothing was.
        device: which kind of device; peaks of CUDA are the current device's.

    Returns:
        A row for `roofline_text`. Kernels of fused rounds are None where they could not be had, and `note` says why.
    """
    device = torch.device(device)
    step, top = count_step(model, batch_size, precision), peaks(device, precision)
    update = update_bytes(num_learners, step.num_parameters, precision)
    batches = batch_bytes(model, batch_size, num_learners, precision)
    work = Work(
        num_images=num_learners * batch_size,
        flops=num_learners * step.flops,
        fused_bytes=num_learners * step.fused_bytes + update + batches,
        operator_bytes=num_learners * step.operator_bytes + update + batches,
    )
    setup = Setup(model, batch_size, num_learners, "fused", "cuda" if device.type == "cuda" else "cpu", precision)
    return {
        "model": model,
        "batch_size": batch_size,
        "num_learners": num_learners,
        "precision": precision,
        "device": device.type,
        "executor": "fused",
        "images_per_s": images_per_s,
        "flops_per_image": step.flops / batch_size,
        "flops_per_round": work.flops,
        "bytes_per_round": {"step": work.fused_bytes - update - batches, "update": update, "batches": batches,
                            "all": work.fused_bytes, "all_unfused": work.operator_bytes},
        "kernels_eager": num_learners * step.num_kernels,
        "peak_flops_per_s": top.flops_per_s,
        "copy_bytes_per_s": top.bytes_per_s,
        "peaks_known": list(top.known),
        **limits(work, top, images_per_s),
        **_counted_rounds(setup),
    }  # fmt: skip


def limits(work: Work, top: Peaks, images_per_s: float | None) -> dict[str, Any]:
    """Time of a round, images/s that FLOPs and bytes allow, which of the two binds, and the share reached. Pure."""
    compute_s, bytes_s = work.flops / top.flops_per_s, work.fused_bytes / top.bytes_per_s
    limit = work.num_images / max(compute_s, bytes_s)
    unfused = work.num_images / max(compute_s, work.operator_bytes / top.bytes_per_s)
    return {
        "round_s": work.num_images / images_per_s if images_per_s else None,
        "limit_images_per_s": limit,
        "limited_by": "FLOPs" if compute_s > bytes_s else "bytes",
        "share_of_limit": images_per_s / limit if images_per_s else None,
        "unfused_limit_images_per_s": unfused,
        "share_of_unfused_limit": images_per_s / unfused if images_per_s else None,
    }


def _counted_rounds(setup: Setup) -> dict[str, Any]:
    """Kernels of fused rounds; a round that fails costs the report this and no more."""
    try:
        return {"kernels_fused": fused_kernels(setup), "note": None}
    except (CrossbowError, RuntimeError) as error:
        return {"kernels_fused": None, "note": str(error).strip().partition("\n")[0]}


def roofline_text(rows: Sequence[Row]) -> str:
    columns = {name: [cell(row) for row in rows] for name, cell in _COLUMNS.items()}
    known = {name: cells for name, cells in columns.items() if any(value != NONE for value in cells)}
    lines = [list(cells) for cells in zip(*known.values(), strict=True)]
    return "\n\n".join([markdown_table(list(known), lines), *_notes(rows)])


def _notes(rows: Sequence[Row]) -> list[str]:
    """Peaks by device and precision, and what could not be had."""
    notes = []
    for row in {(row["device"], row["precision"]): row for row in rows}.values():
        known = row["peaks_known"]
        how = [name + (" (known)" if key in known else " (measured)")
               for key, name in (("bytes_per_s", f"{row['copy_bytes_per_s'] / 1e9:,.1f} GB/s of a copy"),
                                 (row["precision"], f"{row['peak_flops_per_s'] / 1e12:,.3g} TFLOP/s"))]  # fmt: skip
        notes.append(f"Limits of {row['device']}, {row['precision']}: {', '.join(how)}.")
    notes.append(
        "The limit takes point-wise operators as part of their neighbours; unfused, every operator reads and writes "
        "memory by itself. Caches are left out of account."
    )
    return notes + [f"{row['model']} K={row['num_learners']}: {row['note']}" for row in rows if row["note"]]


def _number(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]),
    "b": lambda row: str(row["batch_size"]),
    "K": lambda row: str(row["num_learners"]),
    "precision": lambda row: str(row["precision"]),
    "MFLOP an image": lambda row: _number(row["flops_per_image"] / 1e6, 1),
    "MB a round": lambda row: _number(row["bytes_per_round"]["all"] / 1e6, 1),
    "unfused": lambda row: _number(row["bytes_per_round"]["all_unfused"] / 1e6, 1),
    "kernels a round, eager": lambda row: _number(row["kernels_eager"]),
    "fused": lambda row: _number(row["kernels_fused"]),
    "ms a round": lambda row: _number(row["round_s"] and 1e3 * row["round_s"], 2),
    "images/s": lambda row: _number(row["images_per_s"]),
    "limit": lambda row: _number(row["limit_images_per_s"]),
    "by": lambda row: str(row["limited_by"]),
    "share": lambda row: _percent(row["share_of_limit"]),
    "share unfused": lambda row: _percent(row["share_of_unfused_limit"]),
}


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
    counted = replace(setup, batch_size=min(setup.batch_size, _BATCH_OF_COUNTED_ROUNDS))
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


@dataclass(frozen=True)
class Peaks:
    """The peaks of a device at a precision. `known` lists what is from the table instead of measured."""

    bytes_per_s: float
    flops_per_s: float
    known: tuple[str, ...]


@cache
def peaks(device: torch.device, precision: PrecisionName) -> Peaks:
    """The speed of a copy and of a matrix product, from the table or measured in a fraction of a second each.

    Products are in the precision asked for, with torch's settings as they are.
    """
    known = known_peaks(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    bytes_per_s = known.get("bytes_per_s") or _copy_bytes_per_s(device)
    flops_per_s = known.get(precision) or _product_flops_per_s(device, _DTYPES[precision])
    return Peaks(bytes_per_s, flops_per_s, tuple(name for name in ("bytes_per_s", precision) if name in known))


def known_peaks(name: str) -> Mapping[str, float]:
    """The table's values for a device of that name; nothing for others."""
    return next((found for part, found in _KNOWN.items() if part in name), {})


def _copy_bytes_per_s(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _fastest_s(device, lambda: target.copy_(source))


def _product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    rows = _MATRIX_ROWS[device.type]
    left, right, out = (torch.ones(rows, rows, device=device, dtype=dtype) for _ in range(3))
    return 2 * rows**3 / _fastest_s(device, lambda: torch.mm(left, right, out=out))


def _fastest_s(device: torch.device, function: Callable[[], object]) -> float:
    """The seconds of the fastest of as many calls as fit in the time for it, after one that does not count."""

    def seconds() -> float:
        begun_s = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    seconds()
    until_s, best_s = time.perf_counter() + _MEASURE_S, seconds()
    while time.perf_counter() < until_s:
        best_s = min(best_s, seconds())
    return best_s
