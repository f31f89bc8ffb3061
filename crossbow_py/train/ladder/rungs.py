"""The rungs of the ladder, as a table: what each one trains with, what it depends on, and how far it may be off.

Every rung trains a small model for some rounds and is compared with `serial` on the same device, without TF32. Rungs of
kernels first launch the variants that other models need (`variants.py`), also with TF32. Rungs build on each other:
what has passed is switched on for those that follow, and what has failed is left out. The cheapest come first, and last
those that no run waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from crossbow_py.core.switches import KERNELS

Job = Literal["train", "graphs", "muon", "sum", "ranks", "streamed", "resume"]
Need = Literal["bf16", "triton", "nccl", "devices"]
BEST = "best"  # fused if that passed, else serial

@dataclass(frozen=True)
class Tolerance:
    """The largest differences by precision: norms, relative to the norm of how far the weights went.

    Measured with the model of `child.py` after its nine rounds, on a CPU, kernels in Triton's interpreter: what adds up
    in another order differs by less than 1e-6 in float32, and by up to 1.5e-2 in bfloat16. One learner's stale batch or
    lost gradient in one round makes 2e-2 to 7e-2, and TF32 3e-3. So float32 has room for a hundred times the rounding
    that was measured, as libraries on GPUs choose other algorithms, and is what finds a fault; bfloat16 finds a gross
    one.
    """

    fp32: float = 1e-4
    bf16: float = 4e-2


@dataclass(frozen=True)
class Task:
    """What a rung's child process does, as it is handed over.

    Attributes:
        job: train, graphs (first one that waits for another stream), muon (train with that optimizer), sum (all-reduces
            of one rank), ranks (train on all, under torchrun), streamed (data from worker processes) or resume (from a
            checkpoint).
        device: cuda or cpu.
        executor: the executor that is tried.
        tolerance: the precisions to train in, each with the largest difference from `serial`.
        dropout: whether to train with dropout, too.
        kernels: those of which all variants are tried before it trains, see `variants.py`.
        kept: a folder for what `serial` gives, which the children of other rungs take from there; empty keeps nothing.
    """

    job: Job
    device: str
    executor: str
    tolerance: Mapping[str, float]
    dropout: bool = True
    kernels: Sequence[str] = ()
    kept: str = ""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: the name it is remembered by.
        title: the name on the screen; {backend} is NCCL on CUDA, else gloo.
        job: what the child process does, see `child.py`.
        executor: the executor it trains with.
        proves: the features that executors may use once it has passed (`engine/trust.py`).
        after: the rungs without which it is not tried.
        devices: the types of device it is for.
        needs: what the machine must have.
        precisions: those it trains in, as far as the device's rungs have proven them.
        tolerance: the largest difference by precision, relative to how far the weights went.
        dropout: whether it trains with dropout, too, which kernels do not touch.
        limit_s: seconds until the child is killed.
        serves_auto: whether `executor=auto` needs to know.
    """

    name: str
    title: str
    job: Job = "train"
    executor: str = BEST
    proves: tuple[str, ...] = ()
    after: tuple[str, ...] = ("serial",)
    devices: tuple[str, ...] = ("cuda", "cpu")
    needs: tuple[Need, ...] = ()
    precisions: tuple[str, ...] = ("fp32", "bf16")
    tolerance: Tolerance = Tolerance()
    dropout: bool = True
    limit_s: float = 120.0
    serves_auto: bool = True

    def features(self, proven: frozenset[str]) -> frozenset[str]:
        """Return the kernels, and `graphs`, that its child uses, where `proven` has held before."""
        return (proven | frozenset(self.proves)) & {*KERNELS, "graphs"}


# Kernels are compiled for several shapes and precisions; convolutions for 189, see `variants.py`.
_COMPILES_S, _COMPILES_TILES_S = 300.0, 600.0

RUNGS: tuple[Rung, ...] = (
    Rung("serial", "serial in fp32", executor="serial", proves=("serial",), after=(), precisions=("fp32",)),
    Rung("bf16", "serial in bf16", executor="serial", proves=("bf16",), needs=("bf16",), precisions=("bf16",)),
    Rung("fused", "fused operators", executor="fused", proves=("fused",)),
    Rung(
        "graphs", "+ as CUDA graphs", job="graphs", executor="fused", proves=("graphs",), after=("fused",),
        devices=("cuda",),
    ),
    Rung(
        "update", "+ update kernel", executor="fused", proves=("update",), after=("fused",), devices=("cuda",),
        needs=("triton",), dropout=False, limit_s=_COMPILES_S,
    ),
    Rung(
        "loss_and_batches", "+ loss and batches kernels", executor="fused", proves=("loss", "batches"),
        after=("fused",), devices=("cuda",), needs=("triton",), dropout=False, limit_s=_COMPILES_S,
    ),
    Rung("streams", "streams", executor="streams", proves=("streams",), devices=("cuda",)),
    Rung(
        "layers", "+ layer kernels", executor="fused", proves=("layers",), after=("fused",), devices=("cuda",),
        needs=("triton",), dropout=False, limit_s=_COMPILES_S,
    ),
    Rung(
        "convolutions", "+ measured convolutions", executor="fused", proves=("convolutions",), after=("layers",),
        devices=("cuda",), needs=("triton",), dropout=False, limit_s=_COMPILES_TILES_S,
    ),
    Rung("threads", "threads", executor="threads", devices=("cpu",)),
    Rung("fused_threads", "fused_threads", executor="fused_threads", after=("fused",), devices=("cpu",)),
    Rung("muon", "Muon", job="muon", precisions=("fp32",), dropout=False, serves_auto=False),
    Rung("sum", "{backend} of one rank", job="sum", needs=("nccl",), serves_auto=False),
    Rung("ranks", "{backend} of several ranks", job="ranks", after=("sum",), needs=("devices",), serves_auto=False),
    Rung("streamed", "streamed data", job="streamed", serves_auto=False),
    Rung("resume", "resume from a checkpoint", job="resume", serves_auto=False),
)  # fmt: skip
