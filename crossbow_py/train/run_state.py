"""Where a run stands: counters and bests that a checkpoint carries. Plain values, no tensors, no clock."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from crossbow_py.core.settings import known_fields
from crossbow_py.engine.rounds import RoundOutcome


class OpenEpoch(NamedTuple):
    """The epochs closed before this one, and its own sums so far; see `RunState`."""

    closed_epochs: int
    loss_sum: float
    num_losses: int
    num_correct: float | None


@dataclass
class RunState:
    """Counters of a run.

    `samples_seen` counts samples of submitted rounds: over all learners, or per learner when they are independent.
    The epoch sums cover the rounds absorbed since the last epoch closed; `num_correct` is None when the task is not
    classification. `best_accuracy` and `last_*` are of the data that stops look at: validation, where there is some.
    `apart_since` is the first round after learners last averaged, and `apart_factor` what the learning rate was in it ÷
    the largest of the schedule, had the warm-up been over.
    `sick_learners` were gated, in which round, and wait to be reseeded. `wall_s` is the time of earlier
    processes, and what making the trainer took in this one.
    """

    round_index: int = 0
    apart_since: int = 0
    apart_factor: float = 1.0
    samples_seen: int = 0
    last_round_start: int = 0
    last_recorded: int = -1
    last_accuracy: float | None = None
    last_loss: float | None = None
    closed_epochs: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    num_correct: float | None = 0.0
    elapsed_s: float = 0.0
    wall_s: float = 0.0
    best_accuracy: float | None = None
    time_to_accuracy_s: float | None = None
    num_reseeded: int = 0
    sick_learners: dict[int, int] = field(default_factory=dict)

    def absorb(self, outcome: RoundOutcome) -> None:
        """Add a round's losses to the epoch; gated learners do not count and are noted."""
        for learner in outcome.non_finite_learners:
            self.sick_learners.setdefault(learner, outcome.plan.index)
        for loss, correct, finite in zip(outcome.losses, outcome.num_correct, outcome.finite, strict=True):
            if finite:
                self.loss_sum += loss
                self.num_losses += 1
                self.num_correct = None if correct is None or self.num_correct is None else self.num_correct + correct

    def apart(self, factor: float) -> tuple[int, float]:
        """How many rounds learners will have gone by themselves after the next one, and the factor of their first.

        Both factors are without warm-up; `factor` is that of the next one.
        """
        num_rounds = self.round_index + 1 - self.apart_since
        return num_rounds, factor if num_rounds == 1 else self.apart_factor

    def note_round(self, num_samples: int, factor: float, averages: bool) -> None:
        """Count a round that was submitted, with the factor as of `apart`, and whether learners average in it."""
        if self.apart_since == self.round_index:
            self.apart_factor = factor
        self.round_index, self.last_round_start = self.round_index + 1, self.samples_seen
        if averages:
            self.apart_since = self.round_index
        self.samples_seen += num_samples

    @property
    def train_loss(self) -> float:
        """Mean loss of the epoch so far; NaN before its first round."""
        return self.loss_sum / self.num_losses if self.num_losses else math.nan

    def train_accuracy(self, batch_size: int) -> float | None:
        """Share of the epoch's training samples predicted right, as they were when trained on; None without classes."""
        if self.num_correct is None or not self.num_losses:
            return None
        return self.num_correct / (self.num_losses * batch_size)

    def note_evaluation(self, accuracy: float | None, loss: float, target: float | None) -> None:
        """Keep the last and the best, and the training time at which the target accuracy was first reached."""
        self.last_accuracy, self.last_loss = accuracy, loss
        if accuracy is None:
            return
        self.best_accuracy = accuracy if self.best_accuracy is None else max(self.best_accuracy, accuracy)
        if target is not None and accuracy >= target and self.time_to_accuracy_s is None:
            self.time_to_accuracy_s = self.elapsed_s

    def close_epoch(self, samples_per_epoch: int) -> None:
        """Start the next epoch's sums."""
        self.closed_epochs = self.samples_seen // samples_per_epoch
        self.loss_sum, self.num_losses, self.num_correct = 0.0, 0, 0.0

    @property
    def open_epoch(self) -> OpenEpoch:
        """What `close_epoch` starts anew, for `reopen_epoch`."""
        return OpenEpoch(self.closed_epochs, self.loss_sum, self.num_losses, self.num_correct)

    def reopen_epoch(self, kept: OpenEpoch) -> None:
        """Go on with the epoch that was closed since."""
        self.closed_epochs, self.loss_sum, self.num_losses, self.num_correct = kept

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> RunState:
        """Rebuild from a checkpoint; counters a newer version added start at their defaults.

        Raises TypeError or ValueError for what no run has written.
        """
        return cls(**known_fields(cls, values, least=-1))
