"""CUDA executor between `fused` and `streams`: groups of fused learners, each group on a stream of its own.

Fusing all learners makes the fewest launches, but every operator then waits for the one before, and where one is small
the device idles; groups on streams fill each other's gaps. HFTA and μ-TWO call it sub-array fusion. Tasks, order and
overlap are those of `streams.py` with a group in place of a learner: averaging(n) overlaps learning(·, n+1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from crossbow_py.engine.device.fused_device_tasks import SubArrayTasks
from crossbow_py.engine.device.streams import DeviceStreams
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.scheduler import Scheduler


def groups_of(num_learners: int, num_streams: int) -> list[range]:
    """Neighbouring learners, as evenly as they go, the larger groups first; no more groups than learners."""
    groups = min(num_learners, num_streams)
    small, larger = divmod(num_learners, groups)
    starts = [j * small + min(j, larger) for j in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


class SubArraysExecutor(StreamsExecutor):
    """Groups of learners on `STREAMS` streams. Experimental: no GPU has run it yet.

    Args and errors as `StreamsExecutor`'s; FusionError as `FusedExecutor`'s.
    """

    ORDER = "blocks"
    FUSES = True
    STREAMS: ClassVar[int]

    def __init__(self, tasks: RoundTasks, device: DeviceStreams | None = None) -> None:
        self._groups = groups_of(tasks.bank.num_learners, self.STREAMS)
        super().__init__(tasks, device)

    def _new_scheduler(self, num_streams: int) -> Scheduler:
        return super()._new_scheduler(len(self._groups))

    def _make_bodies(self, tasks: RoundTasks) -> SubArrayTasks:
        return SubArrayTasks(tasks, self._groups, self.NAME)


class TwoSubArrays(SubArraysExecutor):
    """Two groups."""

    NAME = "subarrays2"
    STREAMS = 2


class FourSubArrays(SubArraysExecutor):
    """Four groups."""

    NAME = "subarrays4"
    STREAMS = 4
