"""The number of worker processes that feed a run, and the batch size that they allow. Values in, values out.

The rule is the thesis': with W workers, N learners that take a batch each in a round, and samples of I bytes, the
largest B for which

    t_fetch ≤ t_step · W / N          the workers keep up: a batch takes t_fetch of one of them
    W · batches · B · I < DRAM        their batches fit in the host's memory, and in /dev/shm if they are there
    W ≤ cores,  B ≤ B_max             B_max is what fits on the device

Both times are proportional to B, so the first line gives the number of workers, and the second the largest B.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from crossbow_py.core.host import Host

BATCHES_HELD_A_WORKER = 3  # two that are ready or being made, and one that is being copied
_HOST_SHARE = 0.5  # the share of free memory to use; the rest is for the page cache, or files are read from disk
_SHARED_SHARE = 0.9

Limit = Literal["device memory", "host memory", "shared memory", "cores", "samples"]


@dataclass(frozen=True)
class Loading:
    """The loading of samples to the device.

    Attributes:
        sample_bytes: the bytes of a sample as workers hand it over.
        resident: whether the data set is on the device, so that nothing is loaded.
        fetch_s: the seconds a worker takes for a sample; None if not measured.
        step_s: the seconds the device takes for a sample, with all learners together; None if not measured.
        through_shared: whether workers hand over samples through /dev/shm; images have memory of their own.
    """

    sample_bytes: int
    resident: bool = False
    fetch_s: float | None = None
    step_s: float | None = None
    through_shared: bool = True

    @property
    def needed(self) -> int | None:
        """The number of workers that keep up with the device; None if unknown."""
        if self.fetch_s is None or self.step_s is None or self.step_s <= 0:
            return None
        return max(1, math.ceil(self.fetch_s / self.step_s - 1e-9))


@dataclass(frozen=True)
class Recommendation:
    """A batch size of a learner and a number of workers.

    `limits` says what limits the two, or keeps the workers from being enough; `sentences` say so to the user.
    """

    batch_size: int
    num_workers: int
    limits: tuple[Limit, ...]
    sentences: tuple[str, ...]


def recommend(largest_batch: int, loading: Loading, host: Host, most: int | None = None) -> Recommendation:
    """Return the recommendation of the rule in the module's docstring for this `host`.

    `largest_batch` is B_max, the largest that fits on the device, and `most` another limit of it, such as the number of
    samples.
    """
    limit: Limit = "device memory"
    words = "the device's memory"
    if most is not None and largest_batch >= most:
        largest_batch, limit, words = most, "samples", "the number of samples"
    sentences = [f"The batch size is limited by {words}."]
    if loading.resident:
        sentences.append("No workers: the data set lies on the device.")
        return Recommendation(largest_batch, 0, (limit,), tuple(sentences))
    limits: list[Limit] = [limit]
    wanted, cores = loading.needed, host.cores
    workers = min(cores, wanted or cores)
    if wanted is None:
        unmeasured = "how fast a worker loads" if loading.fetch_s is None else "how fast training is"
        if loading.fetch_s is None and loading.step_s is None:
            unmeasured = "how fast loading and training are"
        sentences.append(f"One worker a usable core ({cores}): {unmeasured} was not measured.")
    elif wanted > cores:
        limits.append("cores")
        sentences.append(f"{wanted} workers would keep up with the device, and there are {cores} usable cores.")
    else:
        keep = "worker keeps" if workers == 1 else "workers keep"
        sentences.append(f"{workers} {keep} up with the device; {cores} cores are usable.")
    fewest = workers if wanted is not None else 1
    workers, batch_size, scarce = _fit(largest_batch, workers, fewest, loading, host)
    if scarce is not None:
        limits.append(scarce)
        left = f"{workers} workers with {BATCHES_HELD_A_WORKER} batches of {batch_size} each"
        sentences.append(f"The {scarce} of this machine holds {left}.")
    return Recommendation(batch_size, workers, tuple(limits), tuple(sentences))


def _fit(largest: int, workers: int, fewest: int, loading: Loading, host: Host) -> tuple[int, int, Limit | None]:
    """Return workers, a batch size and the scarce memory: fewer workers, down to `fewest`, before smaller batches."""
    room: float = _HOST_SHARE * host.memory_bytes
    scarce: Limit = "host memory"
    shared = host.shared_bytes if loading.through_shared else None
    if shared is not None and _SHARED_SHARE * shared < room:
        room, scarce = _SHARED_SHARE * shared, "shared memory"
    samples = int(room / (BATCHES_HELD_A_WORKER * max(1, loading.sample_bytes)))  # for all workers together
    if workers * largest <= samples:
        return workers, largest, None
    workers = max(fewest, min(workers, samples // max(1, largest)))
    return workers, max(1, min(largest, samples // workers)), scarce


@dataclass(frozen=True)
class WorkerState:
    """The state of the worker autotuner.

    Attributes:
        num_workers: the number of workers.
        starved: the largest number that was too few.
        idle_windows: windows in a row with twice as many workers as needed.
        settling: whether the next window is ignored, because workers have just been started.
        reason: a message about the last decision, or "".
    """

    num_workers: int
    starved: int = 0
    idle_windows: int = 0
    settling: bool = False
    reason: str = ""


@dataclass(frozen=True)
class WorkerTuning:
    """The rule of the worker autotuner, `num_workers=auto`, by the share of time that a run waits for data.

    W = ceil(1.25 · t_fetch / t_step) workers are needed. A run that waits gets them at once; workers are taken away
    only after several windows with twice as many, and never down to a number that was too few.

    Args:
        limit: the most workers.
        max_wait: the share of time spent waiting above which it grows.
        patience: the windows with too many workers before it shrinks.
    """

    limit: int
    max_wait: float = 0.03
    patience: int = 3

    def needed(self, fetch_s_per_batch: float, step_s_per_batch: float) -> int:
        """Return the number of workers that keep up, with a quarter to spare, from 1 to the limit."""
        if step_s_per_batch <= 0 or fetch_s_per_batch <= 0:
            return 1
        return min(self.limit, max(1, math.ceil(1.25 * fetch_s_per_batch / step_s_per_batch - 1e-9)))

    def observe(
        self, state: WorkerState, wait_share: float, fetch_s_per_batch: float, step_s_per_batch: float
    ) -> tuple[WorkerState, int | None]:
        """Take a window of training; return the new state, and the new number of workers or None for no change.

        Args:
            state: the state before it.
            wait_share: the share of the window spent waiting for data, in [0, 1].
            fetch_s_per_batch: the seconds that one worker takes for a batch.
            step_s_per_batch: the seconds of training for a batch, without waiting: a round's divided by learners.
        """
        if state.settling:
            return dataclasses.replace(state, settling=False, reason=""), None
        needed = self.needed(fetch_s_per_batch, step_s_per_batch)
        if wait_share > self.max_wait:
            return self._grow(state, needed, wait_share)
        wanted = min(self.limit, max(needed, state.starved + 1))
        if state.num_workers < 2 * wanted:
            return dataclasses.replace(state, idle_windows=0, reason=""), None
        if state.idle_windows + 1 < self.patience:
            return dataclasses.replace(state, idle_windows=state.idle_windows + 1, reason=""), None
        reason = f"{wanted} of {state.num_workers} workers are enough: waiting takes {wait_share:.1%} of the time."
        return WorkerState(wanted, state.starved, settling=True, reason=reason), wanted

    def _grow(self, state: WorkerState, needed: int, wait_share: float) -> tuple[WorkerState, int | None]:
        starved = max(state.starved, state.num_workers)
        wanted = min(self.limit, max(needed, state.num_workers + 1))
        waits = f"waiting for data takes {wait_share:.1%} of the time"
        if wanted <= state.num_workers:
            reason = f"{waits.capitalize()}, and {state.num_workers} workers are as many as there may be."
            return dataclasses.replace(state, idle_windows=0, reason=reason), None
        reason = f"{wanted} workers instead of {state.num_workers}: {waits}."
        return WorkerState(wanted, starved, settling=True, reason=reason), wanted
