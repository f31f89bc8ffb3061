"""Pacing: a `Trainer.fit` is held to windows by what it calls after every round.

A call comes when a round has been submitted and the one before is over. As this holds at both ends of a window, as many
rounds are finished within it as are submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from crossbow_py.core.errors import CrossbowError
from crossbow_py.telemetry.events import RoundEnd


class Ticked(Protocol):
    """A gate, or one of several loops' share of it."""

    @property
    def num_learners(self) -> int | None:
        """The number of learners wanted for the window under way; None leaves it as it is."""

    def tick(self, images: int, /) -> None:
        """See Gate."""


class Paced:
    """Passes the gate after every round, and gives the run the number of learners that the next window wants."""

    def __init__(self, gate: Ticked) -> None:
        self._gate = gate
        self._asked: int | None = None

    def __call__(self, end: RoundEnd) -> int:
        """See `Trainer.fit`. Raises CrossbowError when memory did not hold the learners of the window."""
        if self._asked not in (None, end.num_learners):
            raise CrossbowError(f"memory does not hold {self._asked} learners")
        self._gate.tick(end.images)
        self._asked = self._gate.num_learners or end.num_learners
        return self._asked


class Settling:
    """Lets a run's own auto-tuner work until it has settled or a time limit is over, then calls `ready` and paces.

    From then on the number of learners is left alone: the auto-tuner would take the pauses between windows for a device
    that became slow.
    """

    def __init__(self, gate: Ticked, limit_s: float, ready: Callable[[RoundEnd], None]) -> None:
        self._paced, self._limit_s, self._ready, self._is_ready = Paced(gate), limit_s, ready, False

    def __call__(self, end: RoundEnd) -> int | None:
        """See `Trainer.fit`. What the auto-tuner settled on has run a round when `ready` is called."""
        if self._is_ready:
            return self._paced(end)
        if not end.is_settled and end.elapsed_s < self._limit_s:
            return None
        self._is_ready = True
        self._ready(end)
        return end.num_learners
