"""Several packs on one device: on a CPU in a thread each, on CUDA on streams of their own.

Operators that a pack's thread runs itself take a share of a CPU's cores. Executors that have threads of their own keep
as many as they have alone, and the system shares out the cores: executors for fewer threads would have to be made anew
whenever a pack comes or goes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from crossbow_py.search.packs.pack import Pack

Failures = dict[int, Exception]  # by place of the pack
_PAUSE_S = 1e-4  # between looks at what runs


def advance(packs: Sequence[Pack], is_enough: Callable[[], bool], *, device: torch.device) -> Failures:
    """Train all packs until a segment of any of them is over, or it is enough; afterwards all are drained.

    Every pack goes at its own pace: on a CPU in a thread of its own, on CUDA, where rounds are only enqueued, in turn
    with those that are through with theirs. What raises ends its own pack's rounds and is returned.
    """
    if len(packs) == 1 or device.type == "cuda":
        return _in_turn(packs, is_enough)
    stop = threading.Event()
    share = max(1, torch.get_num_threads() // len(packs))
    with ThreadPoolExecutor(len(packs), "crossbow pack", lambda: torch.set_num_threads(share)) as pool:
        found = pool.map(lambda pack: _alone(pack, is_enough, stop), packs)
        return {place: error for place, error in enumerate(found) if error is not None}


def _alone(pack: Pack, is_enough: Callable[[], bool], stop: threading.Event) -> Exception | None:
    try:
        while not stop.is_set() and not is_enough() and pack.step():
            pass
        stop.set()
        pack.drain()
    except Exception as error:
        stop.set()
        return error
    return None


def _in_turn(packs: Sequence[Pack], is_enough: Callable[[], bool]) -> Failures:
    """A round for every pack that has none to wait for, again and again: a slow pack holds up no fast one."""
    failures: Failures = {}
    goes_on = True
    while goes_on and not is_enough():
        is_idle = True
        for place, pack in enumerate(packs):
            try:
                if len(packs) == 1 or pack.is_ready():
                    goes_on, is_idle = pack.step() and goes_on, False
            except Exception as error:
                failures[place] = error
                goes_on = False
                break  # the others are tried again when what it held is given back
        if goes_on and is_idle:
            time.sleep(_PAUSE_S)  # every pack has a round behind the one it waits for: no device runs dry
    for place, pack in enumerate(packs):
        if place not in failures:
            try:
                pack.drain()
            except Exception as error:
                failures[place] = error
    return failures
