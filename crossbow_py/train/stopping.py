"""When a run ends: limits and targets, and pure functions that say whether one is reached and which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting


@dataclass(frozen=True)
class StopConditions:
    """What stops a run; the first one reached does. At least one must be set.

    Every function returns the name of the field that stops the run, or None to go on.
    """

    max_epochs: float | None = setting(None, "stop after that many epochs", above=0)
    max_samples: int | None = setting(None, "stop after that many samples", minimum=1)
    max_time_s: float | None = setting(None, "stop after that much training time, evaluation left out", above=0)
    max_rounds: int | None = setting(None, "stop after that many rounds (one batch per learner each)", minimum=1)
    target_accuracy: float | None = setting(None, "stop at that accuracy, between 0 and 1", above=0, maximum=1)
    target_loss: float | None = setting(None, "stop at that loss or below", minimum=0)

    def __post_init__(self) -> None:
        check(self)
        values = {field.name: getattr(self, field.name) for field in fields(StopConditions)}
        if all(value is None for value in values.values()):
            raise UserError(f"a run needs an end, got none; set one of {', '.join(values)}.")

    @property
    def needs_evaluation(self) -> bool:
        """Whether there is a target."""
        return self.target_accuracy is not None or self.target_loss is not None

    def check_measured(self, has_data: bool, has_accuracy: Callable[[], bool]) -> None:
        """Raise UserError when a target could never be reached, as nothing measures it."""
        if self.needs_evaluation and not has_data:
            raise UserError(
                "target_accuracy and target_loss are measured on data, got neither test_data nor validation_data; "
                "give one of them."
            )
        if self.target_accuracy is not None and not has_accuracy():
            raise UserError(
                f"target_accuracy={self.target_accuracy:g} is for outputs [batch, classes] with a class for each "
                "sample, and this task has no such accuracy; set target_loss, and measure what you like by metrics."
            )

    def after_round(
        self, samples_seen: int, samples_per_epoch: int, train_time_s: float, num_rounds: int = 0
    ) -> str | None:
        """Why to stop after a round: `max_epochs`, `max_samples`, `max_time_s`, `max_rounds` or None."""
        if self.max_epochs is not None and samples_seen >= self._epoch_samples(self.max_epochs, samples_per_epoch):
            return "max_epochs"
        if self.max_samples is not None and samples_seen >= self.max_samples:
            return "max_samples"
        if self.max_time_s is not None and train_time_s >= self.max_time_s:
            return "max_time_s"
        if self.max_rounds is not None and num_rounds >= self.max_rounds:
            return "max_rounds"
        return None

    def after_evaluation(self, accuracy: float | None, loss: float | None) -> str | None:
        """Why to stop after an evaluation: `target_accuracy`, `target_loss` or None."""
        if self.target_accuracy is not None and accuracy is not None and accuracy >= self.target_accuracy:
            return "target_accuracy"
        if self.target_loss is not None and loss is not None and loss <= self.target_loss:
            return "target_loss"
        return None

    def planned_samples(self, samples_per_epoch: int) -> int | None:
        """Samples at which `max_epochs` or `max_samples` ends the run, None when neither is set."""
        limits = [] if self.max_samples is None else [self.max_samples]
        if self.max_epochs is not None:
            limits.append(self._epoch_samples(self.max_epochs, samples_per_epoch))
        return min(limits, default=None)

    @staticmethod
    def _epoch_samples(epochs: float, samples_per_epoch: int) -> int:
        return max(1, round(epochs * samples_per_epoch))
