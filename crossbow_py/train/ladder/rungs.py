"""The rungs of the ladder, as a table, and the order in which they are tried.

Every rung trains a small model for some rounds and is compared with `serial` on the same device, without TF32. Rungs of
kernels first launch the variants that other models need (`variants.py`), also with TF32. Rungs build on each other:
what has passed is switched on for those that follow, and what has failed is left out. The cheapest come first, and last
those that no run waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from crossbow_py.core.switches import KERNELS, Switches
from crossbow_py.engine.trust import GRAPHS, Outcome, proven
from crossbow_py.engine.trust.compare import TOLERANCES

Job = Literal["train", "graphs", "muon", "sum", "ranks", "streamed", "resume"]
Need = Literal["bf16", "triton", "nccl", "devices"]
BEST = "best"  # fused if that passed, else serial

# The precisions that a rung trains in, each with the largest difference from `serial`.
_FP32 = {"fp32": TOLERANCES[torch.float32].run}
_BF16 = {"bf16": TOLERANCES[torch.bfloat16].run}


@dataclass(frozen=True)
class Task:
    """The work of a rung's child process, as it is handed over.

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
        proves: the features that executors may use once it has passed (`engine/trust/`).
        after: the rungs without which it is not tried.
        devices: the types of device it is for.
        needs: what the machine must have.
        tolerance: the precisions it trains in, as far as the device's rungs have proven them, each with the largest
            difference from `serial`, relative to how far the weights went.
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
    tolerance: Mapping[str, float] = field(default_factory=lambda: {**_FP32, **_BF16})
    dropout: bool = True
    limit_s: float = 120.0
    serves_auto: bool = True

    @property
    def kernels(self) -> list[str]:
        """The kernels of which all variants are tried first."""
        return [feature for feature in self.proves if feature in KERNELS]

    def task(self, device: str, has: frozenset[str], kept: str) -> Task:
        """Return what its child does on a type of device where the features `has` are proven; see `Task` for `kept`."""
        fastest = "fused" if "fused" in has else "serial"
        executor = fastest if self.executor == BEST else self.executor
        able = {name: own for name, own in self.tolerance.items() if name != "bf16" or "bf16" in (*has, *self.proves)}
        return Task(self.job, device, executor, able, self.dropout, self.kernels, kept)

    def switches(self, has: frozenset[str]) -> Switches:
        """Return the kernels and graphs that its child uses where the features `has` are proven."""
        features = has.union(self.proves)
        return Switches(features.intersection(KERNELS), GRAPHS in features)


# Kernels are compiled for several shapes and precisions; convolutions for 189, see `variants.py`.
_COMPILES_S, _COMPILES_TILES_S = 300.0, 600.0

RUNGS: tuple[Rung, ...] = (
    Rung("serial", "serial in fp32", executor="serial", proves=("serial",), after=(), tolerance=_FP32),
    Rung("bf16", "serial in bf16", executor="serial", proves=("bf16",), needs=("bf16",), tolerance=_BF16),
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
    Rung("muon", "Muon", job="muon", tolerance=_FP32, dropout=False, serves_auto=False),
    Rung("sum", "{backend} of one rank", job="sum", needs=("nccl",), serves_auto=False),
    Rung("ranks", "{backend} of several ranks", job="ranks", after=("sum",), needs=("devices",), serves_auto=False),
    Rung("streamed", "streamed data", job="streamed", serves_auto=False),
    Rung("resume", "resume from a checkpoint", job="resume", serves_auto=False),
)  # fmt: skip


def climb(
    rungs: Sequence[Rung],
    run: Callable[[Rung, frozenset[str]], Outcome],
    lacks: Callable[[Rung], str | None] = lambda _: None,
    known: Mapping[str, Outcome] | None = None,
    tell: Callable[[Rung, Outcome, bool], None] = lambda *_: None,
) -> dict[str, Outcome]:
    """Try the rungs in order, and return their outcomes by name.

    A rung whose predecessor did not pass, or that the machine cannot try, is skipped; others are tried all the same.

    Args:
        rungs: the rungs; those that a rung is `after` come before it, or it is tried without them.
        run: tries one, with the features that those before have proven.
        lacks: returns what the machine lacks to try a rung, on one line, or None.
        known: outcomes that are remembered, and not found out again, unless the rung was skipped.
        tell: called with each rung and its outcome, and whether that was known.
    """
    found: dict[str, Outcome] = {}
    titles = {rung.name: rung.title.removeprefix("+ ") for rung in rungs}
    for rung in rungs:
        missed = [name for name in rung.after if name in found and not found[name].passed]
        is_known = False
        if reason := lacks(rung):
            outcome = Outcome("skipped", reason, proves=rung.proves)
        elif missed:
            before = found[missed[0]]
            ended = "was skipped" if before.status == "skipped" else before.status
            reason = f"it builds on '{titles[missed[0]]}', which {ended}"
            outcome = Outcome("skipped", reason, proves=rung.proves, may_change=before.may_change)
        elif known and rung.name in known and known[rung.name].status != "skipped":
            outcome, is_known = known[rung.name], True
        else:
            outcome = run(rung, proven(found))
        found[rung.name] = outcome
        tell(rung, outcome, is_known)
    return found


def untried(rungs: Sequence[Rung], lacks: Callable[[Rung], str | None], known: Mapping[str, Outcome]) -> list[Rung]:
    """Return the rungs that `climb` would try, if each of them passed."""
    found: list[Rung] = []

    def run(rung: Rung, _: frozenset[str]) -> Outcome:
        found.append(rung)
        return Outcome("passed", proves=rung.proves)

    climb(rungs, run, lacks, known)
    return found
