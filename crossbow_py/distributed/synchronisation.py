"""What ranks tell each other when they meet, and what follows: pure functions of values.

A meeting is one exchange between two rounds, at which every rank learns the same. Whatever may come up on one rank
alone (a signal, a full disk, bad data, memory, a slow clock) is acted upon after a meeting only, and so by all alike.
One rank alone meets itself before every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from crossbow_py.core.signals import StopSignal

MEET_EVERY_S = 0.05
_SIGNALS = (None, *StopSignal.REASONS)  # the gravest last


@dataclass(frozen=True)
class Report:
    """One rank's words, all numbers, for they travel as one vector.

    Attributes:
        elapsed_s: of training, on its clock.
        signal: which has come, a `signal_number`.
        fails: whether it cannot go on, for a reason that is told afterwards.
        out_of_memory: whether its learners did not fit.
        num_sick: learners that were gated and not reseeded yet.
        checkpoint: where the writing of its part stands, an index of `CheckpointKeeper.STATUSES`.
        on_trial: whether its threads wait for each other in another way than before, until that is measured.
    """

    elapsed_s: float
    signal: float = 0
    fails: float = 0
    out_of_memory: float = 0
    num_sick: float = 0
    checkpoint: float = 0
    on_trial: float = 0

    def to_values(self) -> list[float]:
        """For the exchange."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Report:
        """The inverse of `to_values`."""
        return cls(*values)


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a meeting.

    `elapsed_s` is the slowest clock's, `signal` the gravest that came to anybody, None for none.
    """

    elapsed_s: float
    signal: str | None
    fails: bool
    out_of_memory: bool
    num_sick: int
    checkpoints: tuple[int, ...]
    on_trial: bool = False


def signal_number(status: str | None) -> int:
    """As a number, for `Report`."""
    return _SIGNALS.index(status)


def agree(reports: Sequence[Report]) -> Agreed:
    """What follows from all ranks' reports, in rank order."""
    return Agreed(
        elapsed_s=max(report.elapsed_s for report in reports),
        signal=_SIGNALS[int(max(report.signal for report in reports))],
        fails=any(report.fails for report in reports),
        out_of_memory=any(report.out_of_memory for report in reports),
        num_sick=int(sum(report.num_sick for report in reports)),
        checkpoints=tuple(int(report.checkpoint) for report in reports),
        on_trial=any(report.on_trial for report in reports),
    )


def rounds_to_next(round_s: float, period: int, every_round: bool) -> int:
    """After how many rounds ranks meet again: in about `MEET_EVERY_S`, and where they wait for each other anyway.

    Args:
        round_s: of the slowest rank.
        period: rounds between averagings.
        every_round: whether a round must not begin before all have met, as data may fail.
    """
    if every_round:
        return 1
    wanted = MEET_EVERY_S / round_s if round_s > 0 else 1
    return max(1, round(wanted / period)) * period


def differing(found: Sequence[Sequence[float]]) -> list[int]:
    """Ranks whose checksum is not the one most of its group have; of (group, checksum) in rank order.

    With a tie those that differ from the group's first are named.
    """
    odd = []
    for group in sorted({each[0] for each in found}):
        own = {rank: each[1] for rank, each in enumerate(found) if each[0] == group}
        values = list(own.values())
        usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
        odd += [rank for rank, value in own.items() if value != usual]
    return odd


class Meetings:
    """When ranks meet, which all count alike. `round_index` is the first round's."""

    def __init__(self, round_index: int) -> None:
        self._last = self._next = round_index

    def is_due(self, round_index: int) -> bool:
        """Whether they meet before this round."""
        return round_index >= self._next

    def met(self, round_index: int, seconds: float, period: int, every_round: bool) -> None:
        """They have met before this round, `seconds` of training after the last time.

        Twice as many rounds as before at most: the first ones, which nobody waits for yet, tell little of how long
        a round takes.
        """
        rounds, self._last = round_index - self._last, round_index
        wanted = rounds_to_next(seconds / max(1, rounds), period, every_round)
        self._next = round_index + min(wanted, max(2 * rounds, 1 if every_round else period))
