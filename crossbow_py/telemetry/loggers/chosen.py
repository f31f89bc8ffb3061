"""The loggers and listeners that the command line names: `logger=[tensorboard,mlflow]`, `listeners=[pkg.mod.fn]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import shown, suggestion
from crossbow_py.core.targets import import_target
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowTracker
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import Tracker
from crossbow_py.telemetry.loggers.wandb_logger import WandbTracker

LoggerName = Literal["tensorboard", "mlflow", "wandb"]
TENSORBOARD: LoggerName = "tensorboard"
_TRACKERS: Mapping[str, type[MLflowTracker | WandbTracker]] = {each.KEY: each for each in (MLflowTracker, WandbTracker)}


def check_loggers(names: object) -> None:
    """Raise UserError for a logger that there is not, and for one that is named twice."""
    known = get_args(LoggerName)
    given = names if isinstance(names, list | tuple) else [names] if isinstance(names, str) else []
    for name in given:
        if name not in known:
            raise UserError(f"unknown logger {shown(name)}{suggestion(name, known)}")
        if given.count(name) > 1:
            raise UserError(f"logger has {name} {given.count(name)} times; name it once.")


def trackers(names: Sequence[str]) -> list[Tracker]:
    """Return a tracker for each service that is named.

    Raises UserError for one that is not installed, or that will record nothing.
    """
    found: list[Tracker] = [_TRACKERS[name]() for name in names if name in _TRACKERS]
    for tracker in found:
        tracker.check()
    return found


def loggers_of(names: Sequence[str]) -> list[Listener]:
    """Return the loggers of a run but TensorBoard, which the trainer has. Raises UserError as `trackers` does."""
    return [RunLogger(tracker) for tracker in trackers(names)]


def listeners_of(targets: Sequence[str]) -> list[Listener]:
    """Return what the targets make: each is a class of listeners, or a function that returns one.

    Raises UserError for a target that cannot be imported or called, and for one that makes something else.
    """
    return [_listener_of(path) for path in targets]


def _listener_of(path: str) -> Listener:
    target = import_target("listeners", path)
    try:
        listener = target()
    except UserError:
        raise
    except Exception as error:  # of the user's code
        raise UserError(
            f"listeners={path} is called without arguments, and failed with {one_line(error)}; correct it."
        ) from error
    if not isinstance(listener, Listener):
        raise UserError(
            f"listeners={path} must make a crossbow_py.Listener, got {type(listener).__name__}; name a subclass."
        )
    return listener
