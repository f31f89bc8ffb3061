"""The rule by which threads that share an operator spin or sleep while they wait for each other.

OpenMP's threads spin, which is fastest if each has a core of its own. If another program takes a core, the running
threads spin for the one that does not run, after every operator, and a small model trains up to a hundred times slower.
Sleeping threads then lose about their share of the cores, but up to a quarter of throughput on a quiet machine. The
results are the same bit for bit.

The rule is pure: a state and a window of training in, a state and a message out; no clock, no torch. Each way of
waiting is measured by the median of three windows, and the other one is tried:

    spinning    tries to sleep if three windows are below half of the best throughput of as many learners, or if
                others held half a core in each of them; keeps sleeping if it is 25 % faster;
    sleeping    tries to spin if others held less than a quarter of a core in three windows, and at long intervals in
                any case, because not every kernel reports this; keeps spinning unless it is 5 % slower.

Every trial doubles the wait before the next one, so that a load that comes and goes has little effect. A collapse of
throughput does not wait; the next one counts only after throughput has recovered, or a trial has shown it to be normal.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

_WINDOWS = 3
_FEWEST = 2  # windows with the current number of learners, which the auto-tuner changes after four
_COLLAPSE = 0.5
_GAIN = 1.25  # times the throughput of spinning threads, from which sleeping is kept
_LOSS = 0.95  # times the throughput of sleeping threads, from which spinning is kept
HELD_CORES = 0.5
_FREE_CORES = 0.25
_MAX_BACK_OFF = 8
_ANYWAY = 64  # times the wait before a trial, after which sleeping threads try to spin in any case


@dataclass(frozen=True)
class Window:
    """A stretch of training.

    Attributes:
        images_per_s: its throughput.
        num_learners: the number of learners.
        others: the cores that other processes held, or None if the kernel does not report this.
    """

    images_per_s: float
    num_learners: int
    others: float | None


@dataclass(frozen=True)
class WaitState:
    """The state of the rule; the default is that at the start of a run.

    Attributes:
        sleeps: whether threads sleep now, also while that is on trial.
        on_trial: whether the current way of waiting is on trial.
        num_learners: the current number of learners.
        recent: the last windows with this way of waiting; only those with `num_learners` count for throughput.
        usual: the throughput before the trial, with `num_learners`.
        best: the highest throughput of spinning threads with `num_learners`.
        waited: the windows since the last trial.
        num_trials: the number of trials so far.
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
    """Take a window, or a longer stretch that counts as several.

    The first window with another number of learners is dropped, and ends a trial.

    Returns:
        The new state, and a message if the way of waiting has changed for good; else "".
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
    """Return whether to try the other way of waiting."""
    patience = 1 << min(state.num_trials, _MAX_BACK_OFF)
    others = [window.others for window in state.recent if window.others is not None]
    known = len(others) == len(state.recent)
    if state.sleeps:
        free = known and max(others) < _FREE_CORES
        return state.waited >= (patience if free else _ANYWAY * patience)
    if all(rate < _COLLAPSE * state.best for rate in _rates(state)):
        return True
    return known and min(others) >= HELD_CORES and state.waited >= patience


def _judge(state: WaitState) -> tuple[WaitState, str]:
    """End a trial that is over, and one of spinning as soon as throughput has collapsed."""
    rate, wanted = _rate(state), state.usual * (_GAIN if state.sleeps else _LOSS)
    collapsed = not state.sleeps and rate < _COLLAPSE * state.usual
    if len(state.recent) < _WINDOWS and not collapsed:
        return state, ""
    if rate < wanted:
        # Sleeping did not help, so this is what spinning threads can reach now.
        best = state.usual if state.sleeps else state.best
        return replace(state, sleeps=not state.sleeps, on_trial=False, recent=(), best=best, waited=0), ""
    state = replace(state, on_trial=False, recent=(), best=state.best if state.sleeps else rate, waited=0)
    return state, _sentence(state, rate)


def _rates(state: WaitState) -> list[float]:
    """Return the throughputs of the recent windows with the current number of learners."""
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
