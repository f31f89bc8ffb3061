"""A roofline: how far a measured throughput is from what the device could do at most.

A round of K learners with B images each must do so many FLOPs, move so many bytes and launch so many kernels
(roofline_counts.py); the device does so many a second (roofline_device.py). The limit is where FLOPs or bytes alone
would take all of the time:

    limit = K·B ÷ max(FLOPs of a round ÷ peak FLOP/s, bytes of a round ÷ copy bandwidth)

Bytes are those of the learners' steps with point-wise operators made part of their neighbours (once more with every
operator by itself), of the update and of the batches, as if nothing stayed in a cache from one operator to the next.
Where tensors of a round are small beside the caches, more than 100 % of the limit is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crossbow_py.core.errors import CrossbowError
from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.rounds import ExecutorName, Setup
from experiments.tables.markdown import NONE, markdown_table
from experiments.throughput.roofline_counts import batch_bytes, count_step, fused_kernels, update_bytes
from experiments.throughput.roofline_device import Peaks, peaks, traced_rounds

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
    executor: ExecutorName = "fused",
) -> dict[str, Any]:
    """Work out what a measured cell could have been, as plain values.

    Args:
        model: of the zoo.
        batch_size, num_learners: B and K.
        precision: fp32 or bf16.
        images_per_s: what was measured; None where nothing was.
        device: which kind of device; peaks of CUDA are the current device's.
        executor: which one; only rounds of `fused` are counted whole. On CUDA some of its rounds are run and traced.

    Returns:
        A row for `roofline_text`. Kernels of fused rounds and what the tracer saw are None where they could not be had,
        and `note` then says why.
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
    setup = Setup(model, batch_size, num_learners, executor, "cuda" if device.type == "cuda" else "cpu", precision)
    return {
        "model": model,
        "batch_size": batch_size,
        "num_learners": num_learners,
        "precision": precision,
        "device": device.type,
        "executor": executor,
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
        **_of_real_rounds(setup),
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


def _of_real_rounds(setup: Setup) -> dict[str, Any]:
    """Kernels of fused rounds and the idle share; a round that fails costs the report these and no more."""
    found: dict[str, Any] = {"kernels_fused": None, "kernels_traced": None, "idle_share": None, "note": None}
    try:
        found["kernels_fused"] = fused_kernels(setup)
        trace = traced_rounds(setup) if setup.device == "cuda" else None
        if trace is not None:
            found["kernels_traced"], found["idle_share"] = trace.kernels_per_round, trace.idle_share
    except (CrossbowError, RuntimeError) as error:
        found["note"] = str(error).strip().partition("\n")[0]
    return found


def roofline_text(rows: Sequence[Row]) -> str:
    """A row a cell, and what the limits are; columns that nothing is known of are left out."""
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
    "traced": lambda row: _number(row["kernels_traced"]),
    "ms a round": lambda row: _number(row["round_s"] and 1e3 * row["round_s"], 2),
    "images/s": lambda row: _number(row["images_per_s"]),
    "limit": lambda row: _number(row["limit_images_per_s"]),
    "by": lambda row: str(row["limited_by"]),
    "share": lambda row: _percent(row["share_of_limit"]),
    "share unfused": lambda row: _percent(row["share_of_unfused_limit"]),
    "idle": lambda row: _percent(row["idle_share"]),
}
