"""The recommendations of `crossbow_py.engine.sizing`, and the best pair of batch size and workers by trying them all.

The seconds are given, of no machine: on a CPU a step takes so long that one worker always does, and the pairs of
interest are those where several are needed. Every model is fed by another number of workers then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.core.host import Host
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.sizing.memory import Job, LearnerModel, Sample
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.sizing.workers import Loading, recommend
from crossbow_py.engine.update.optimizers import SGD
from experiments.estimate.truth import Subject

CORES = 16
BATCHES_HELD_A_WORKER = 3  # two made ahead or in hand, one being copied
USABLE_SHARE = 0.5  # of the memory; the rest keeps the files that are read again
# Seconds of one worker for a sample, and of the device for a sample of any learner.
SECONDS = {
    "resnet34": (0.008, 0.002),
    "resnet50": (0.008, 0.0035),
    "resnet152": (0.008, 0.009),
    "densenet121": (0.008, 0.003),
    "alexnet": (0.008, 0.0006),
    "resnet3d18": (0.1, 0.008),
    "vgg16": (0.0002, 0.0005),
}


@dataclass(frozen=True)
class WorkerLoad:
    """The work of the workers: I bytes and t_fetch a sample, t_step a sample, N learners that take a batch each."""

    sample_bytes: int
    fetch_s: float
    step_s: float
    num_learners: int


def best_pair(load: WorkerLoad, largest_batch: int, memory_bytes: int) -> tuple[int, int] | None:
    """The largest B and, for it, the fewest workers W, of all pairs that keep the rules; None where none does::

    t_fetch(B) ≤ t_round(B) · W / N        a round has N batches
    W · batches · B · I ≤ usable DRAM
    """
    best: tuple[int, int] | None = None
    for workers in range(CORES, 0, -1):
        for batch_size in range(1, largest_batch + 1):
            round_s = load.num_learners * batch_size * load.step_s
            keeps_up = batch_size * load.fetch_s <= round_s * workers / load.num_learners * (1 + 1e-9)
            held = workers * BATCHES_HELD_A_WORKER * batch_size * load.sample_bytes
            if keeps_up and held <= USABLE_SHARE * memory_bytes and (best is None or batch_size >= best[0]):
                best = batch_size, workers
    return best


def compare(load: WorkerLoad, largest_batch: int, memory_bytes: int) -> Mapping[str, Any]:
    """Return the recommended and the best (batch size, workers)."""
    loading = Loading(load.sample_bytes, fetch_s=load.fetch_s, step_s=load.step_s, through_shared=True)
    found = recommend(largest_batch, loading, Host(CORES, memory_bytes, shared_bytes=None))
    best = best_pair(load, largest_batch, memory_bytes)
    return {
        "largest_batch": largest_batch,
        "recommended": [found.batch_size, found.num_workers],
        "limits": list(found.limits),
        "best": None if best is None else list(best),
    }


def estimate(subject: Subject) -> LearnerModel:
    """Estimate a model by two probes without a device."""
    job = Job(nn.functional.cross_entropy, SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4), SMA(), FP32)
    staged = subject.sample_bytes + 8  # a target is an int64
    return estimate_learner(subject.make_model, Sample(subject.input_shape), job, staged_sample_bytes=staged)
