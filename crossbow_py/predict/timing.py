"""Which of several calls is the fastest, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

_TRIES, _TRIED_S = 3, 0.05  # of every call, at least
Name = TypeVar("Name")


def fastest(runs: Mapping[Name, Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> Name:
    """The name of the call that takes the least time, by the median of some in turn, after one that does not count."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begun = clock()
    while len(next(iter(times.values()))) < _TRIES or clock() - begun < _TRIED_S * len(runs):
        for name, run in runs.items():
            before = clock()
            run()
            times[name].append(clock() - before)
    return min(times, key=lambda name: statistics.median(times[name]))
