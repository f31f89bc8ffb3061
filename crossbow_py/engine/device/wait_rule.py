"""Whether the threads that share an operator spin or sleep while they wait for each other: by throughput alone.

OpenMP's threads spin, which is the fastest where each has a core of its own. Where another program takes a core, those
that run wait actively for the one that does not, after every operator, and a small model trains up to a hundred times
slower. Threads that sleep lose about their share of the cores then, and up to a quarter on a quiet machine. What is
computed is the same to the bit.

Pure: a state and a window of training in, a state and a sentence out; no clock, no torch. Either way of waiting is
measured by the median of three windows, and changes by a trial of the other:

    spinning    tries sleep when three windows are below half of the best that the same learners have shown, or
                when others held half a core in each of them; keeps it when it is 25 % faster;
    sleeping    tries to spin when others held less than a quarter of a core in three windows, and at long
                intervals whatever they held, as not every kernel tells; keeps it unless it is 5 % slower.

Every trial doubles the wait before the next one, so that a load that comes and goes changes little. Throughput that
collapses does not wait: it cannot collapse again before it has recovered, or the trial has shown it to be the usual.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

_WINDOWS = 3
_FEWEST = 2  # of them with the present learners: the auto-tuner goes on to the next number after four
_COLLAPSE = 0.5
_GAIN = 1.25  # times the throughput of spinning threads: what makes sleep worth it
_LOSS = 0.95  # times the throughput of sleeping threads: what spinning may come to, to be the usual way again
_HELD_CORES = 0.5
_FREE_CORES = 0.25
_MAX_BACK_OFF = 8
_ANYWAY = 64  # times the wait before a trial, after which sleeping threads try to spin whatever others hold


@dataclass(frozen=True)
class Window:
    """A stretch of training: its throughput, with so many learners, and the cores that other processes held.

    `others` is None where the kernel does not tell.
    """

    images_per_s: float
    num_learners: int
    others: float | None


@dataclass(frozen=True)
class WaitState:
    """How threads wait, and what is known; the default is the start of a run.

    `sleeps` is how they wait now, also while that is `on_trial`; `recent` are the last windows of it, of which those
    with as many learners as now tell of throughput. `usual` is that before the trial and `best` the highest of spinning
    threads, both with `num_learners`. `waited` counts windows since the last trial.
    """

    sleeps: bool = False
    on_trial: bool = False
    num_learners: int = 0
    recent: tuple[Window, ...] = ()
    usual: float = 0.0
    best: float = 0.0
    waited: int = 0
    num_trials: int = 0


def observe(state: WaitState, window: Window, num_windows: int = 1) -> tuple[WaitState, str]:
    """Take a window, or a longer stretch that counts for several. Returns a sentence when the way of waiting changes.

    The first window with another number of learners is dropped, and ends a trial.
    """
    if window.num_learners != state.num_learners:
        usual_way, recent = state.sleeps != state.on_trial, () if state.on_trial else state.recent
        return replace(
            state, sleeps=usual_way, on_trial=False, num_learners=window.num_learners, recent=recent, best=0.0
        ), ""
    recent = (*state.recent, *(window,) * min(num_windows, _WINDOWS))[-_WINDOWS:]
    state = replace(state, recent=recent, waited=state.waited + num_windows)
    if state.on_trial:
        return _judge(state)
    if len(recent) < _WINDOWS or len(_rates(state)) < _FEWEST:
        return state, ""
    if _is_due(state):
        return replace(
            state, sleeps=not state.sleeps, on_trial=True, recent=(), usual=_rate(state), waited=0,
            num_trials=state.num_trials + 1,
        ), ""  # fmt: skip
    return state if state.sleeps else replace(state, best=max(state.best, _rate(state))), ""


def _is_due(state: WaitState) -> bool:
    """Whether the other way of waiting is to be tried."""
    patience = 1 << min(state.num_trials, _MAX_BACK_OFF)
    others = [window.others for window in state.recent if window.others is not None]
    told = len(others) == len(state.recent)
    if state.sleeps:
        free = told and max(others) < _FREE_CORES
        return state.waited >= (patience if free else _ANYWAY * patience)
    if all(rate < _COLLAPSE * state.best for rate in _rates(state)):
        return True
    return told and min(others) >= _HELD_CORES and state.waited >= patience


def _judge(state: WaitState) -> tuple[WaitState, str]:
    """End a trial when it is over, one of spinning as soon as it has collapsed."""
    rate, wanted = _rate(state), state.usual * (_GAIN if state.sleeps else _LOSS)
    collapsed = not state.sleeps and rate < _COLLAPSE * state.usual
    if len(state.recent) < _WINDOWS and not collapsed:
        return state, ""
    if rate < wanted:
        # What sleep did not mend is what spinning threads can do now.
        best = state.usual if state.sleeps else state.best
        return replace(state, sleeps=not state.sleeps, on_trial=False, recent=(), best=best, waited=0), ""
    state = replace(state, on_trial=False, recent=(), best=state.best if state.sleeps else rate, waited=0)
    return state, _sentence(state, rate)


def _rates(state: WaitState) -> list[float]:
    """Return those of the last windows that had as many learners as now."""
    return [window.images_per_s for window in state.recent if window.num_learners == state.num_learners]


def _rate(state: WaitState) -> float:
    return statistics.median(_rates(state))


def _sentence(state: WaitState, rate: float) -> str:
    if state.sleeps:
        return (
            f"Training ran at {state.usual:,.0f} images/s, as happens where other programs use the cores: threads now "
            f"sleep while they wait for each other, which gives {rate:,.0f} images/s and the same results."
        )
    return (
        f"Threads spin again while they wait for each other, as they do where cores are free: {rate:,.0f} images/s, "
        f"{state.usual:,.0f} before."
    )
