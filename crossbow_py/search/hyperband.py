"""Hyperband and successive halving, synchronously: which trials train how far, and which may train on now.

Pure. A search is `brackets` and the `results` of the segments that are over; everything follows from these two alone,
whatever the order in which the results came. A trial goes on to the next rung only when every trial of its bracket that
reached its rung has a result there, and it is among the best of them:

    brackets   s = s_max .. 0, with s_max = floor(log_eta(max_epochs / min_epochs))
    trials     n = ceil((s_max + 1) · eta^s / (s + 1))
    rung i     floor(n · eta^-i) trials, measured at max_epochs · eta^(i - s) epochs

Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization" (JMLR 2018), algorithm 1, with
min_epochs as the unit of resource. Pruners that decide when a trial reports compare it with earlier arrivals only:
with trials in lockstep they would keep all or one, depending on the order of arrival.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal, TypeAlias

from crossbow_py.core.errors import UserError

Method = Literal["hyperband", "successive_halving", "none"]

_MAX_TRIALS = 100_000
_MAX_RATIO = 1e6  # of the epochs of the last rung to those of the first
_ROUNDING = 1e-9  # 0.15 / 0.05 is a little less than 3 in floats, and yet a power of 3


@dataclass(frozen=True, order=True)
class Segment:
    """The training of one trial from the rung before, or from the start, to this rung."""

    trial: int
    rung: int


Outcome: TypeAlias = float | None  # the value measured at the rung; None when the trial raised or diverged on the way
Results: TypeAlias = Mapping[Segment, Outcome]


@dataclass(frozen=True)
class Bracket:
    """Trials that are compared with each other.

    Attributes:
        index: number among the brackets of the search.
        first_trial: their lowest number; `num_trials` follow on each other.
        epochs: where each rung is measured, rising; the last is the same in every bracket.
        sizes: how many trials reach each rung when none fails.
    """

    index: int
    first_trial: int
    num_trials: int
    epochs: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def trials(self) -> range:
        """The numbers of its trials."""
        return range(self.first_trial, self.first_trial + self.num_trials)


class TrialState(StrEnum):
    """The state of a trial; one that trains at the moment is still WAITING or PROMOTED."""

    WAITING = "waiting"  # has no result yet
    PAUSED = "paused"  # measured at a rung that others have still to reach
    PROMOTED = "promoted"  # may train, or trains, towards its next rung
    PRUNED = "pruned"
    COMPLETE = "complete"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """True when the trial is never trained again."""
        return self in (TrialState.PRUNED, TrialState.COMPLETE, TrialState.FAILED)


_MEASURED_FOR_GOOD = (TrialState.PRUNED, TrialState.COMPLETE)


@dataclass(frozen=True)
class TrialStanding:
    """The standing of a trial: its state, its last rung with a value, and that value; None before the first."""

    state: TrialState
    rung: int | None = None
    value: float | None = None


# --- brackets ---------------------------------------------------------------------------------------------------------


def make_brackets(
    method: Method, *, num_trials: int | None, min_epochs: float, max_epochs: float, eta: int
) -> tuple[Bracket, ...]:
    """Return the brackets of a search, its trials numbered from 0.

    Args:
        method: `hyperband` repeats its pass over all brackets, `successive_halving` has brackets of eta^s_max trials
            that start at the lowest rung, `none` trains every trial to the end.
        num_trials: at least 1, cuts the last bracket, so that exactly so many exist; None is one pass, or one bracket.
        min_epochs: least epochs of the first rung; `none` does not read it.
        max_epochs: epochs of the last rung, greater than 0.
        eta: at least 2: one of so many trials goes on to the next rung.

    Raises:
        UserError: `num_trials` or `min_epochs` gives no brackets; `SearchConfig` checks the others.
    """
    assert eta >= 2, f"one of {eta} trials goes on, which is no halving"
    assert math.isfinite(max_epochs), "epochs of the last rung are not finite"
    if num_trials is not None and num_trials > _MAX_TRIALS:
        raise UserError(f"num_trials must be from 1 to {_MAX_TRIALS}, got {num_trials}; take fewer.")
    if method == "none":
        if num_trials is None:
            raise UserError("num_trials must be set where method is none, got null; set it, as in num_trials=20.")
        kinds = [(num_trials, 0)]
    else:
        s_max = _deepest(min_epochs, max_epochs, eta)
        depths = range(s_max, -1, -1) if method == "hyperband" else range(s_max, s_max + 1)
        kinds = [(-(-(s_max + 1) * eta**s // (s + 1)), s) for s in depths]
    one_pass = sum(size for size, _ in kinds)
    if num_trials is None and one_pass > _MAX_TRIALS:
        raise UserError(
            f"{method} from {min_epochs} epochs has {one_pass} trials, and the most is {_MAX_TRIALS}; set num_trials, "
            "or a higher min_epochs."
        )
    total = one_pass if num_trials is None else num_trials
    brackets: list[Bracket] = []
    first = 0
    while first < total:
        size, depth = kinds[len(brackets) % len(kinds)]
        size = min(size, total - first)
        epochs = tuple(max_epochs / eta ** (depth - rung) for rung in range(depth + 1))
        # One that was cut may have fewer trials than rungs: its best one still trains to the end.
        sizes = tuple(max(1, size // eta**rung) for rung in range(depth + 1))
        brackets.append(Bracket(len(brackets), first, size, epochs, sizes))
        first += size
    return tuple(brackets)


def _deepest(min_epochs: float, max_epochs: float, eta: int) -> int:
    """s_max: the most rungs below the last one."""
    if not 0 < min_epochs <= max_epochs:
        raise UserError(
            f"min_epochs must be above 0 and at most max_epochs ({max_epochs}), got {min_epochs}; take a part of that, "
            f"such as min_epochs={max_epochs / eta:g}."
        )
    ratio = max_epochs / min_epochs
    if ratio > _MAX_RATIO:
        raise UserError(
            f"min_epochs must be at least a millionth of max_epochs ({max_epochs}), got {min_epochs}; raise it."
        )
    depth = 0
    while eta ** (depth + 1) <= ratio * (1 + _ROUNDING):
        depth += 1
    return depth


def bracket_of(brackets: Sequence[Bracket], trial: int) -> Bracket:
    """Return the bracket the trial is in."""
    found = bisect.bisect_right(brackets, trial, key=lambda bracket: bracket.first_trial) - 1
    bracket = brackets[max(found, 0)]
    assert trial in bracket.trials, f"no bracket has trial {trial}"
    return bracket


def to_epochs(brackets: Sequence[Bracket], segment: Segment) -> float:
    """Return epochs the trial has been trained for when the segment is over and it is measured."""
    return bracket_of(brackets, segment.trial).epochs[segment.rung]


# --- rungs ------------------------------------------------------------------------------------------------------------


def survivors(outcomes: Mapping[int, Outcome], keep: int, *, maximize: bool) -> tuple[int, ...]:
    """Return the `keep` best trials of a rung by `outcomes` (by trial), ascending.

    Ties go to the lower trial number. Fewer are left when fewer have a finite value: no other survives.
    """
    finite = [(value, trial) for trial, value in outcomes.items() if value is not None and math.isfinite(value)]
    finite.sort(key=lambda pair: (-pair[0] if maximize else pair[0], pair[1]))
    return tuple(sorted(trial for _, trial in finite[:keep]))


def ready(brackets: Sequence[Bracket], results: Results, *, maximize: bool) -> list[Segment]:
    """Return the segments that may run now; those that run at the moment are among them, as they have no result yet.

    Trials that were promoted come first, those of earlier brackets before those of later ones, and then the trials
    that have not begun: so brackets interleave, and new trials take the rows that a narrowing rung leaves.
    """
    promoted: list[Segment] = []
    new: list[Segment] = []
    for bracket in brackets:
        rungs = _rungs(bracket, results, maximize)
        segments = (Segment(trial, len(rungs) - 1) for trial in rungs[-1])
        (promoted if len(rungs) > 1 else new).extend(each for each in segments if each not in results)
    return promoted + new


def is_over(brackets: Sequence[Bracket], results: Results, *, maximize: bool) -> bool:
    """Return whether nothing is left to run."""
    return not ready(brackets, results, maximize=maximize)


def standing(brackets: Sequence[Bracket], results: Results, *, maximize: bool) -> dict[int, TrialStanding]:
    """Return the standing of each trial, by trial, ascending."""
    found: dict[int, TrialStanding] = {}
    for bracket in brackets:
        last = len(bracket.epochs) - 1
        for rung, trials in enumerate(_rungs(bracket, results, maximize)):
            is_complete = all(Segment(trial, rung) in results for trial in trials)
            for trial in trials:
                before = found.get(trial, TrialStanding(TrialState.WAITING))
                found[trial] = _at_rung(before, results, Segment(trial, rung), last, is_complete)
    return found


def _at_rung(
    before: TrialStanding, results: Results, segment: Segment, last_rung: int, is_complete: bool
) -> TrialStanding:
    """Return the standing of a trial that took part in a rung; one that survives is looked at again at the next."""
    if segment not in results:
        state = TrialState.PROMOTED if segment.rung else TrialState.WAITING
        return TrialStanding(state, before.rung, before.value)
    value = results[segment]
    if value is None or not math.isfinite(value):
        return TrialStanding(TrialState.FAILED, before.rung, before.value)
    if segment.rung == last_rung:
        return TrialStanding(TrialState.COMPLETE, segment.rung, value)
    return TrialStanding(TrialState.PRUNED if is_complete else TrialState.PAUSED, segment.rung, value)


def best(brackets: Sequence[Bracket], results: Results, *, maximize: bool) -> int | None:
    """Return the trial with the best value, ties to the lower number; None while there is no value.

    Only values at the most epochs that any trial has been measured at are compared. A trial that has failed counts no
    longer, whatever it reached before.
    """
    return best_of(brackets, standing(brackets, results, maximize=maximize), maximize=maximize)


def beaten(brackets: Sequence[Bracket], standings: Mapping[int, TrialStanding], *, maximize: bool) -> set[int]:
    """Return the failed and pruned trials that can be the `best` no longer, whatever comes of those that go on.

    These may all fail: then the best of the pruned and the complete ones is the best of all, and it is not among them.
    What is beaten stays beaten.
    """
    ended = {trial: where for trial, where in standings.items() if where.state in _MEASURED_FOR_GOOD}
    last_resort = best_of(brackets, ended, maximize=maximize)
    lost = (TrialState.FAILED, TrialState.PRUNED)
    return {trial for trial, where in standings.items() if where.state in lost and trial != last_resort}


def best_of(brackets: Sequence[Bracket], standings: Mapping[int, TrialStanding], *, maximize: bool) -> int | None:
    """Return the `best` trial by the standings of all."""
    measured: dict[float, dict[int, Outcome]] = {}
    for trial, where in standings.items():
        if where.rung is not None and where.state is not TrialState.FAILED:
            measured.setdefault(to_epochs(brackets, Segment(trial, where.rung)), {})[trial] = where.value
    return survivors(measured[max(measured)], 1, maximize=maximize)[0] if measured else None


def is_reached(brackets: Sequence[Bracket], results: Results, target: float) -> bool:
    """Return whether a trial that was trained to the end has a value of at least `target`; then `best` has it too."""
    return any(
        value is not None and value >= target and segment.rung == len(bracket_of(brackets, segment.trial).epochs) - 1
        for segment, value in results.items()
    )


def _rungs(bracket: Bracket, results: Results, maximize: bool) -> list[tuple[int, ...]]:
    """The trials that take part in each rung up to the first that is not complete; none after one where all failed."""
    rungs = [tuple(bracket.trials)]
    for rung, keep in enumerate(bracket.sizes[1:]):
        reached = [Segment(trial, rung) for trial in rungs[-1]]
        if not all(segment in results for segment in reached):
            break
        rungs.append(survivors({segment.trial: results[segment] for segment in reached}, keep, maximize=maximize))
    return rungs


# --- lengths ----------------------------------------------------------------------------------------------------------


def segment_lengths(bracket: Bracket) -> list[float]:
    """Return the epochs between its rungs, the first from 0."""
    return [end - begin for begin, end in pairwise((0.0, *bracket.epochs))]


def planned_epochs(brackets: Iterable[Bracket]) -> float:
    """Return the epochs of training of a whole search in which no trial fails."""
    return sum(
        size * length for each in brackets for size, length in zip(each.sizes, segment_lengths(each), strict=True)
    )


def total_samples(brackets: Iterable[Bracket], samples_per_epoch: int) -> int:
    """Return the samples that a whole search trains on if no trial fails."""
    return round(planned_epochs(brackets) * samples_per_epoch)
