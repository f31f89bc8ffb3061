"""The standing of a search by the records of its trials: the leader, the epochs trained, the names of parameters.

Pure: values in, values out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from crossbow_py.search.events import RunningTrial, TrialRecord
from crossbow_py.search.hyperband import Bracket, TrialStanding, TrialState, best_of, bracket_of, segment_lengths
from crossbow_py.telemetry.figures import shown_range

_LONGEST_REASON = 160  # characters


def ranked(trials: Iterable[TrialRecord], *, maximize: bool) -> list[TrialRecord]:
    """Return the trials with a value, best first: more epochs come before a better value, ties by trial number.

    Trials that failed after it come last.
    """
    sign = -1.0 if maximize else 1.0
    measured = [(last_epochs(each), each.values[last_epochs(each)], each) for each in trials if each.values]
    finite = [
        (each.state is TrialState.FAILED, -epochs, sign * value, each.trial, each)
        for epochs, value, each in measured if math.isfinite(value)
    ]  # fmt: skip
    return [each for *_, each in sorted(finite, key=lambda own: own[:-1])]


def leader(brackets: Sequence[Bracket], trials: Iterable[TrialRecord], *, maximize: bool) -> TrialRecord | None:
    """Return the record of the search's best trial, as `hyperband.best` finds it."""
    records = {each.trial: each for each in trials}
    standings = {number: TrialStanding(each.state, each.rung, each.value) for number, each in records.items()}
    best = best_of(brackets, standings, maximize=maximize)
    return None if best is None else records[best]


def failures(trials: Iterable[TrialRecord]) -> dict[str, list[int]]:
    """Return the trials that failed by the first line of their reason, the most frequent reasons first."""
    found: dict[str, list[int]] = defaultdict(list)
    for each in trials:
        if each.state is TrialState.FAILED:
            lines = (each.reason or "").split("\n")
            reason = " ".join(lines[0].split()) or "for no reason that was recorded"
            found[reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…"].append(each.trial)
    return dict(sorted(found.items(), key=lambda own: (-len(own[1]), own[1])))


def last_epochs(trial: TrialRecord) -> float:
    """Return the epochs at its last value; 0 before the first."""
    return max(trial.values, default=0.0)


def value_range(trials: Iterable[TrialRecord], *, maximize: bool) -> tuple[float, float] | None:
    """Return the range of values that a picture shows, as `shown_range` of all values of the trials."""
    return shown_range([value for each in trials for value in each.values.values()], maximize=maximize)


def num_results(trial: TrialRecord) -> int:
    """Return the number of segments that are over: those with a value, and the one it failed in."""
    return (0 if trial.rung is None else trial.rung + 1) + (trial.state is TrialState.FAILED)


def trained_epochs(brackets: Sequence[Bracket], trials: Iterable[TrialRecord]) -> float:
    """Epochs of the segments that are over; one in which a trial failed counts as if it had trained to the end."""
    return sum(sum(segment_lengths(bracket_of(brackets, each.trial))[: num_results(each)]) for each in trials)


def running_epochs(brackets: Sequence[Bracket], running: Iterable[RunningTrial]) -> float:
    """Return the epochs of training so far in segments that are not over."""
    return sum(each.progress * segment_lengths(bracket_of(brackets, each.trial))[each.rung] for each in running)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return, for each dotted key, the shortest end that tells it from the others."""
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        names[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return names


def as_text(value: Any) -> str:
    """Return the value of a parameter in a few characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
