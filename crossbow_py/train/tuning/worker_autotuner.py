"""Chooses the number of worker processes that load a run's data: the first number, and its tuning in training."""

from __future__ import annotations

from typing import Literal

import torch

from crossbow_py.core.host import Host, read_host
from crossbow_py.data.feed import Feed
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from crossbow_py.engine.sizing.workers import Loading, WorkerState, WorkerTuning, recommend

_WINDOW_S = 2.0  # seconds of training

# The numbers that `auto` begins with: enough to keep one GPU busy on most data; on CPUs a single one, because learners
# need the cores. The autotuner corrects them in training.
_FIRST_ON_CUDA, _FIRST_ON_CPU = 8, 1


def first_workers(asked: int | Literal["auto"], device: torch.device, training: bool = True, num_local: int = 1) -> int:
    """Return the number to begin with; `num_local` ranks share the host. In evaluation, learners need no cores."""
    if asked != "auto":
        return asked
    cores = read_host().shared_by(num_local).cores
    if not training:
        return min(_FIRST_ON_CUDA, cores)
    return min(_FIRST_ON_CUDA, max(1, cores - 1)) if device.type == "cuda" else _FIRST_ON_CPU


class WorkerAutotuner:
    """Cuts training time into windows and applies the tuning rule to each. Owned by the training loop.

    Args:
        feed: the feed whose number of workers is tuned; a sample of it must have been loaded.
        host: the share of this machine that the workers may use.
    """

    def __init__(self, feed: StreamingFeed, host: Host) -> None:
        loading = Loading(feed.sample_bytes, through_shared=feed.through_shared)
        limit = recommend(feed.batch_size, loading, host).num_workers
        self.tuning, self.state = WorkerTuning(limit), WorkerState(min(feed.num_workers, limit))
        self._feed = feed
        self._begun: tuple[float, ...] | None = None  # the counters at the start of a window
        self._at_limit = False
        feed.use_workers(self.state.num_workers)

    def start(self) -> None:
        """Begin a new window, as training starts or resumes on a new clock."""
        self._begun = None

    def after_round(self, elapsed_s: float, waited_s: float, num_batches: int) -> str:
        """Apply the rule if a window is over. Called between rounds.

        Args:
            elapsed_s: seconds of training, without pauses.
            waited_s: the part of them spent waiting for data.
            num_batches: different batches trained on so far.

        Returns a message for the user, empty if there is none.
        """
        now = (elapsed_s, waited_s, num_batches, *self._feed.loading_times)
        self._begun = self._begun or now
        seconds, waited, batches, loaded, loading_s = (b - a for a, b in zip(self._begun, now, strict=True))
        if seconds < _WINDOW_S or batches < 1 or loaded < 1:
            return ""
        self._begun = now
        step_s = (seconds - waited) / batches
        self.state, wanted = self.tuning.observe(self.state, waited / seconds, loading_s / loaded, step_s)
        if wanted is not None:
            self._feed.use_workers(wanted)
            return self.state.reason
        said, self._at_limit = self._at_limit, self._at_limit or bool(self.state.reason)
        return "" if said else self.state.reason


def worker_autotuner(asked: int | Literal["auto"], feed: Feed, num_local: int = 1) -> WorkerAutotuner | None:
    """Return the autotuner of a feed's workers; None if their number is fixed, or the feed does not stream.

    `num_local` ranks share the host.
    """
    if asked != "auto" or not isinstance(feed, StreamingFeed):
        return None
    return WorkerAutotuner(feed, read_host().shared_by(num_local))
