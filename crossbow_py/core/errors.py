"""Errors with an exit code, which says whether the user or the program was at fault."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from crossbow_py.core.version import PACKAGE

# `?password=...` of libpq and redis-py, and their like for keys and in MySQL
_IN_QUERY = re.compile(r"([?&][^=&\s]*passw(?:or)?d=)[^&\s]*", re.IGNORECASE)
_SECRETS = re.compile(r"(?<=://).*[@?].*", re.DOTALL)
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


class CrossbowError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        exit_code: the process's exit code.
        after_joining: whether the ranks had joined when it was raised. Before that, all ranks of a host raise the same.
    """

    exit_code = 1
    after_joining = False


class UserError(CrossbowError):
    """The user's mistake, as one sentence with the field, the rule, the value received and the remedy."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint cannot be used: missing, corrupted, or of another model or configuration."""


class BaseWrittenError(UserError):
    """The model's forward has written a frozen parameter, whose memory other models and results may share."""


class UnknownIdError(UserError):
    """The data have an id that an embedding of the model has no row for."""


class DataError(CrossbowError):
    """No batch can be made, and the run stops: one sentence, with the sample that was being loaded."""


class BadDataError(DataError, UserError):
    """The data set's items cannot be made into a batch, for example for different shapes."""

    exit_code = 2


class BadSampleError(BadDataError):
    """More samples than allowed cannot be read. The message names one of them."""


class NonFiniteError(CrossbowError):
    """A learner's loss or gradient norm stopped being finite, and the run stops for it.

    Args:
        learner: the first such learner, counted over all devices.
        round_index: the round it happened in.
        last_checkpoint: the newest checkpoint from before.
        everyone: whether every learner is non-finite, so that there is none to reseed from.
        learning_rate: the rate of the last round, if known.
    """

    def __init__(
        self, learner: int, round_index: int, last_checkpoint: str | None, everyone: bool = False,
        learning_rate: float | None = None,
    ) -> None:  # fmt: skip
        self.learner, self.round_index, self.last_checkpoint = learner, round_index, last_checkpoint
        good = f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
        lost = ", and with it every learner" if everyone else ""
        resume = "Resume it with on_nonfinite=reseed, or start" if last_checkpoint and not everyone else "Start"
        rate = "" if learning_rate is None else f" than {learning_rate:.2g}"
        data = "NaN in the data, and for batches in which the loss ignores every target"
        remedy = (
            f"Look for {data}; no step had been taken yet."
            if round_index == 0
            else f"{resume} anew with a lower optimizer.learning_rate{rate} or with optimizer.clip_norm; if that does "
            f"not help, look for {data}."
        )
        super().__init__(f"learner {learner} went non-finite in round {round_index}{lost}; {good}. {remedy}")


class SearchError(CrossbowError):
    """A search cannot go on, or has no result. Finished trials are kept. One sentence with the remedy."""


class DeviceLostError(SearchError):
    """The device refuses all further work of this process, so that every later trial would fail too.

    Args:
        cause: the device's error, which it repeats from now on.
    """

    def __init__(self, cause: BaseException) -> None:
        said = (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
        super().__init__(
            f"the device rejects all further work from this process ({said}); what was finished is kept. Start the "
            "same command again with resume=auto; if it ends like this again, find out with device=cpu whether a model "
            "is given indices or labels that are out of range, and otherwise take another device."
        )


class LearnerError(CrossbowError):
    """A task failed with an exception, which is chained as the cause.

    Args:
        task: the task, such as learning(1).
        round_index: the round it belongs to.
        stream: the stream it ran on, such as learner 1.
        cause: the exception.
    """

    def __init__(self, task: str, round_index: int, stream: str, cause: BaseException) -> None:
        self.task, self.round_index, self.stream = task, round_index, stream
        super().__init__(f"{task} failed in round {round_index} on {stream}: {type(cause).__name__}: {cause}")


class RankError(CrossbowError):
    """The failure of one rank, raised on all ranks; exactly one of them prints it.

    Args:
        rank: the rank that failed.
        text: its error message.
        exit_code: its error's exit code.
        kind: the name of its error's class.
        is_said: whether this rank prints it.
    """

    def __init__(self, rank: int, text: str, exit_code: int, kind: str, is_said: bool) -> None:
        self.rank, self.exit_code, self.kind, self.is_said = rank, exit_code, kind, is_said
        self.is_of_data = kind in (each.__name__ for each in (DataError, BadDataError, BadSampleError))
        super().__init__(f"rank {rank}: {text}")


def is_of_data(error: BaseException | None) -> bool:
    """Return whether the data failed, on this rank or another."""
    return isinstance(error, DataError) or (isinstance(error, RankError) and error.is_of_data)


class RankLostError(CrossbowError):
    """Another rank has ended or cannot be reached any more. The cause is the connection's error."""

    def __init__(self, found: str = "another rank has ended, or its host cannot be reached any more") -> None:
        super().__init__(
            f"{found}; its own output and the launcher's say why. With torchrun --max-restarts the run goes on by "
            "itself from its newest checkpoint, otherwise when it is started again with resume=auto."
        )


class CentralModelError(CrossbowError):
    """The central average models of the ranks differ, which no sound machine lets happen."""

    def __init__(self, ranks: list[int], round_index: int) -> None:
        named = ", ".join(map(str, ranks))
        super().__init__(
            f"the central average model of rank {named} differs from the others' before round {round_index}: memory or "
            "network corrupts data there. Go on from an earlier checkpoint on other machines; a lower "
            "distributed.check_every_rounds finds it sooner."
        )


def is_users_code(filename: str) -> bool:
    """Return whether code in a file is the user's: neither of this package nor of an installed one."""
    return PACKAGE not in Path(filename).parents and not filename.startswith(_INSTALLED)


def raised_at(error: BaseException) -> str:
    """Return " at FILE:LINE", the line of the user's code that raised: the innermost one outside installed packages.

    Without such a line it is the innermost one outside this package, and without that either the text is empty.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if PACKAGE not in Path(frame.filename).parents]
    own = [frame for frame in frames if is_users_code(frame.filename)]
    return f" at {(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error to raise for an output folder that cannot be written; `error` says why."""
    return UserError(f"output_dir {path} cannot be written ({error.strerror or error}); choose another folder.")


def without_query_password(text: str) -> str:
    """Return a text in which passwords in the query of a server's address are hidden."""
    return _IN_QUERY.sub(r"\1***", text)


def without_secrets(address: str) -> str:
    """Return a server's address, or a text with one, with all behind :// hidden if it has a user or a query."""
    return _SECRETS.sub("***", address)


def text_of(error: BaseException) -> str:
    """Return an exception's text on one line, which may be empty."""
    return " ".join(str(error).split())


def one_line(error: BaseException) -> str:
    """Return an exception's type and text on one line."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
