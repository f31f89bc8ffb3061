"""Synchronisation of ranks: what they report to each other, what follows, and when. Pure functions of values.

Ranks synchronise by one exchange between two rounds, after which all know the same. What comes up on one rank (a
signal, a full disk, bad data, memory, a slow clock) is acted upon only after a synchronisation, so all ranks act in the
same way. A single rank synchronises with itself before every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossbow_py.core.signals import StopSignal

SYNCHRONISE_EVERY_S = 0.05
_SIGNALS = (None, *StopSignal.REASONS)  # the most severe last


@dataclass(frozen=True)
class Report:
    """A rank's report: only numbers, as it is sent as one vector.

    Attributes:
        elapsed_s: seconds of training on the rank's clock.
        signal: the signal that has come, as a `signal_number`.
        fails: whether the rank cannot go on; it gives the reason afterwards.
        out_of_memory: whether the rank's learners did not fit.
        num_non_finite: learners that are gated and not reseeded yet.
        checkpoint: the state of writing the rank's part, an index into `CheckpointManager.STATUSES`.
        on_trial: whether another way for the rank's threads to wait for each other is being measured.
        gradient_variance, squared_gradient, num_compared: sums over the rank's comparisons of gradients since the last
            synchronisation, and their number.
    """

    elapsed_s: float
    signal: float = 0
    fails: float = 0
    out_of_memory: float = 0
    num_non_finite: float = 0
    checkpoint: float = 0
    on_trial: float = 0
    gradient_variance: float = 0
    squared_gradient: float = 0
    num_compared: float = 0

    def to_values(self) -> list[float]:
        """Return the report as a vector."""
        return [float(value) for value in vars(self).values()]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Report:
        """Build a report from the vector of `to_values`."""
        return cls(*values)


@dataclass(frozen=True)
class Agreed:
    """The facts that all ranks know after a synchronisation.

    `elapsed_s` is the slowest clock's time, and `signal` the most severe signal on any rank, None for none.
    `compared` has the sums of all ranks over comparisons of gradients, and their number.
    """

    elapsed_s: float
    signal: str | None
    fails: bool
    out_of_memory: bool
    num_non_finite: int
    checkpoints: tuple[int, ...]
    on_trial: bool = False
    compared: tuple[float, float, int] = (0.0, 0.0, 0)


def signal_number(status: str | None) -> int:
    """Return a signal's status as a number for `Report`."""
    return _SIGNALS.index(status)


def agree(reports: Sequence[Report]) -> Agreed:
    """Combine all ranks' reports, in rank order."""
    return Agreed(
        elapsed_s=max(report.elapsed_s for report in reports),
        signal=_SIGNALS[int(max(report.signal for report in reports))],
        fails=any(report.fails for report in reports),
        out_of_memory=any(report.out_of_memory for report in reports),
        num_non_finite=int(sum(report.num_non_finite for report in reports)),
        checkpoints=tuple(int(report.checkpoint) for report in reports),
        on_trial=any(report.on_trial for report in reports),
        compared=(
            sum(report.gradient_variance for report in reports),
            sum(report.squared_gradient for report in reports),
            int(sum(report.num_compared for report in reports)),
        ),
    )


def rounds_to_next(round_s: float, period: int, every_round: bool) -> int:
    """Return the rounds to the next synchronisation: about `SYNCHRONISE_EVERY_S`, in whole averaging periods.

    At the end of an averaging period ranks wait for each other anyway.

    Args:
        round_s: seconds a round of the slowest rank.
        period: rounds between averagings.
        every_round: whether ranks must synchronise before every round, as data may fail.
    """
    if every_round:
        return 1
    wanted = SYNCHRONISE_EVERY_S / round_s if round_s > 0 else 1
    return max(1, round(wanted / period)) * period


def differing_ranks(found: Sequence[Sequence[float]]) -> list[int]:
    """Return the ranks whose checksum is not the most common one of their group.

    With a tie, these are the ranks that differ from the first of the group.

    Args:
        found: (group, checksum) of every rank, in rank order.
    """
    odd = []
    for group in sorted({each[0] for each in found}):
        own = {rank: each[1] for rank, each in enumerate(found) if each[0] == group}
        values = list(own.values())
        usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
        odd += [rank for rank, value in own.items() if value != usual]
    return odd


class SynchronisationSchedule:
    """The rounds before which ranks synchronise, the same on all. `round_index` is that of the first round."""

    def __init__(self, round_index: int) -> None:
        self._last = self._next = round_index

    def is_due(self, round_index: int) -> bool:
        """Return whether ranks synchronise before this round."""
        return round_index >= self._next

    def synchronised(self, round_index: int, seconds: float, period: int, every_round: bool) -> None:
        """Note a synchronisation before this round, `seconds` of training after the last one, and plan the next.

        The interval at most doubles: the first rounds return before they are over and tell little of a round's time.
        """
        rounds, self._last = round_index - self._last, round_index
        wanted = rounds_to_next(seconds / max(1, rounds), period, every_round)
        self._next = round_index + min(wanted, max(2 * rounds, 1 if every_round else period))
