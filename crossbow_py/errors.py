"""Errors with an exit code: whose mistake it was decides what the process says and returns (DESIGN: exit codes)."""

from __future__ import annotations


class CrossbowError(Exception):
    """Base of every error raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(CrossbowError):
    """The user's mistake: one sentence with the field, the rule, the value received and the remedy."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint cannot be used: missing, corrupted, or of another model or configuration."""


class DataError(CrossbowError):
    """Batches cannot be made, and the run stops for it: one sentence, with the sample that was being worked on."""


class BadDataError(DataError, UserError):
    """What the data set gives makes no batch, such as items of different shapes."""

    exit_code = 2


class BadSampleError(BadDataError):
    """More samples cannot be read than are allowed to; names one of them."""


class NonFiniteError(CrossbowError):
    """A learner's loss or gradient norm stopped being finite, and the run stops for it.

    Args:
        learner, round_index: where it was first seen.
        last_checkpoint: the newest one, from before.
        everyone: every learner is lost, so that there is none to reseed from.
    """

    def __init__(self, learner: int, round_index: int, last_checkpoint: str | None, everyone: bool = False) -> None:
        self.learner, self.round_index, self.last_checkpoint = learner, round_index, last_checkpoint
        good = f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
        lost = ", and with it every learner" if everyone else ""
        resume = "Resume it with on_nonfinite=reseed, or start" if last_checkpoint and not everyone else "Start"
        super().__init__(
            f"learner {learner} went non-finite in round {round_index}{lost}; {good}. {resume} anew with a lower "
            "optimizer.learning_rate or with optimizer.clip_norm; if that does not help, look for NaN in the data."
        )


class LearnerError(CrossbowError):
    """A task failed with an exception: carries the task, its round and its stream; the cause is chained."""

    def __init__(self, task: str, round_index: int, stream: str, cause: BaseException) -> None:
        self.task, self.round_index, self.stream = task, round_index, stream
        super().__init__(f"{task} failed in round {round_index} on {stream}: {type(cause).__name__}: {cause}")
