"""Errors with an exit code: whose mistake it was decides what the process says and returns."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from crossbow_py.core.version import PACKAGE

_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


class CrossbowError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        exit_code: what the command line returns for it.
        after_joining: whether the ranks had joined when it was raised; before that, all ranks of a host raise the same.
    """

    exit_code = 1
    after_joining = False


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
        learner: where it was first seen, counted over all devices.
        round_index: in which round.
        last_checkpoint: the newest one, from before.
        everyone: every learner is lost, so that there is none to reseed from.
    """

    def __init__(self, learner: int, round_index: int, last_checkpoint: str | None, everyone: bool = False) -> None:
        self.learner, self.round_index, self.last_checkpoint = learner, round_index, last_checkpoint
        good = f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
        lost = ", and with it every learner" if everyone else ""
        resume = "Resume it with on_nonfinite=reseed, or start" if last_checkpoint and not everyone else "Start"
        data = "NaN in the data, and for batches of which the loss leaves every target out"
        remedy = (
            f"Look for {data}; no step had been taken yet."
            if round_index == 0
            else f"{resume} anew with a lower optimizer.learning_rate or with optimizer.clip_norm; if that does not "
            f"help, look for {data}."
        )
        super().__init__(f"learner {learner} went non-finite in round {round_index}{lost}; {good}. {remedy}")


class SearchError(CrossbowError):
    """A search cannot go on, or came to nothing; what was finished is kept. One sentence with the remedy."""


class DeviceLostError(SearchError):
    """The device refuses all further work of this process, which would fail every trial after the one that caused it.

    Args:
        cause: what the device said, with which it answers from now on.
    """

    def __init__(self, cause: BaseException) -> None:
        said = (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
        super().__init__(
            f"the device does nothing for this process any more ({said}); what was finished is kept. Start the same "
            "command again with resume=auto; if it ends like this again, find out with device=cpu whether a model is "
            "given indices or labels that it has not, and otherwise take another device."
        )


class LearnerError(CrossbowError):
    """A task failed with an exception, which is chained as the cause.

    Args:
        task: which, such as learning(1).
        round_index: in which round.
        stream: where it ran, such as learner 1.
        cause: the exception.
    """

    def __init__(self, task: str, round_index: int, stream: str, cause: BaseException) -> None:
        self.task, self.round_index, self.stream = task, round_index, stream
        super().__init__(f"{task} failed in round {round_index} on {stream}: {type(cause).__name__}: {cause}")


class RankError(CrossbowError):
    """What another rank of the run has failed with, raised on all; or what this one has, where another says it.

    Args:
        rank: which.
        text: what it said.
        exit_code: as that error's.
        kind: the name of that error's class.
        is_said: whether this rank is to say it.
    """

    def __init__(self, rank: int, text: str, exit_code: int, kind: str, is_said: bool) -> None:
        self.rank, self.exit_code, self.kind, self.is_said = rank, exit_code, kind, is_said
        self.is_of_data = kind in (each.__name__ for each in (DataError, BadDataError, BadSampleError))
        super().__init__(f"rank {rank}: {text}")


def is_of_data(error: BaseException | None) -> bool:
    """Whether it is the data that failed, on this rank or another."""
    return isinstance(error, DataError) or (isinstance(error, RankError) and error.is_of_data)


class RankLostError(CrossbowError):
    """Another rank has ended, or cannot be reached any more; the cause says what the connection to it said."""

    def __init__(self, found: str = "another rank has ended, or its host cannot be reached any more") -> None:
        super().__init__(
            f"{found}; its own output and the launcher's say why. With torchrun --max-restarts the run goes on by "
            "itself from its newest checkpoint, otherwise when it is started again with resume=auto."
        )


class CentralModelError(CrossbowError):
    """Ranks whose central average model is not the others', which no sound machine lets happen."""

    def __init__(self, ranks: list[int], round_index: int) -> None:
        named = ", ".join(map(str, ranks))
        super().__init__(
            f"the central average model of rank {named} differs from the others' before round {round_index}: memory or "
            "network corrupts data there. Go on from an earlier checkpoint on other machines; a lower "
            "distributed.check_every_rounds finds it sooner."
        )


def raised_at(error: BaseException) -> str:
    """Where the user's own code raised an exception: " at FILE:LINE", the innermost line outside installed packages.

    Of an exception that no line of the user's has part in, it is the innermost that is not in this package; empty
    where there is none.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if PACKAGE not in Path(frame.filename).parents]
    own = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    return f" at {(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""


def unwritable(path: Path, error: OSError) -> UserError:
    """What to raise where a folder that was asked for cannot be written; `error` says why."""
    return UserError(f"output_dir {path} cannot be written ({error.strerror or error}); choose another folder.")


def text_of(error: BaseException) -> str:
    """An exception's text on one line; it may have none."""
    return " ".join(str(error).split())


def one_line(error: BaseException) -> str:
    """An exception's type and text on one line."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
