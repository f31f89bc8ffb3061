"""The interface of a tracking service, and the courier that works for it in a thread of its own.

A tracker has one run open at a time. It is opened, and told in the end, by whoever records a run or a search; between
that all of its methods are called by the courier's thread alone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from crossbow_py.core.errors import UserError, one_line, unwritable
from crossbow_py.core.file_locks import locked
from crossbow_py.core.files import check_own, own_file
from crossbow_py.telemetry.events import Images

Plain = bool | int | float | str

SEND_EVERY_S = 10.0
END_S = 60.0  # how long the end of a run waits for the service
_CLOSE_S = 10.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True)
class Subject:
    """What is recorded: a run or a search.

    Attributes:
        experiment: the name of the recipe.
        folder: its folder, whose name it gets; None if it has none.
        parameters: what it is compared by, by dotted keys; they stay when it goes on.
        facts: what else is known when it starts.
        continues: whether it goes on in the run that its folder knows of, if any.
        worker: the process, if each has a run of its own: one that several cannot share.
    """

    experiment: str
    folder: Path | None
    parameters: Mapping[str, Plain]
    facts: Mapping[str, Plain]
    continues: bool
    worker: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the run; None leaves it to the service."""
        name = self.folder.resolve().name if self.folder is not None else None
        return name if self.worker is None or name is None else f"{name} {self.worker}"


class Point(NamedTuple):
    """Values at so many samples seen; `time_ms` is of the clock, since 1970."""

    samples_seen: int
    time_ms: int
    values: dict[str, float]


class TrialRun(NamedTuple):
    """A trial that has ended: its parameters, its values by samples seen, and whether it failed."""

    number: int
    parameters: Mapping[str, Plain]
    values: Mapping[int, float]
    failed: bool


class Tracker(ABC):
    """A run in a tracking service. Whatever its methods raise is the service's failure.

    Attributes:
        NAME: the service's name.
        KEY: the logger's name on the command line.
        MODULE: the package that it takes.
        IS_SHARED: whether several processes may write to one run.
    """

    NAME: ClassVar[str]
    KEY: ClassVar[str]
    MODULE: ClassVar[str]
    IS_SHARED: ClassVar[bool]

    def __init__(self) -> None:
        if importlib.util.find_spec(self.MODULE) is None:
            raise UserError(
                f"logger=[{self.KEY}] needs {self.NAME}, which is not installed; run "
                f'pip install "crossbow_py[{self.KEY}]", or leave it out.'
            )

    @abstractmethod
    def open(self, subject: Subject) -> list[str]:
        """Begin the run, or go on with it. Returns sentences for the user. Raises UserError."""

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Add to the curves."""

    @abstractmethod
    def picture(self, name: str, picture: Images, samples_seen: int) -> None:
        """Show a picture, uint8 [H, W, C]."""

    @abstractmethod
    def file(self, path: Path) -> None:
        """Keep a copy of a file."""

    @abstractmethod
    def model(self, path: Path) -> None:
        """Keep a copy of a file with weights."""

    @abstractmethod
    def trials(self, trials: Sequence[TrialRun], metric: str) -> None:
        """Show the trials of a search, by the values of their metric."""

    @abstractmethod
    def end(self, status: str, samples_seen: int, figures: Mapping[str, float], facts: Mapping[str, Plain]) -> None:
        """End the run with its final figures. The status is that of a run's or a search's summary."""


@contextmanager
def refusing(tracker: Tracker, where: str, remedy: str) -> Iterator[None]:
    """Raise UserError, without passwords, for whatever a service raises when a run begins."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = _PASSWORD.sub("", f"{where} cannot record the run ({one_line(error).rstrip('.')})")
        raise UserError(f"logger=[{tracker.KEY}]: {said}; {remedy}, or leave {tracker.KEY} out.") from error


def without_password(address: str) -> str:
    """Return an address without the user and the password in it."""
    return _PASSWORD.sub("", address)


@dataclass
class KnownId:
    """The id of a run in a tracking service; None before there is one."""

    value: str | None


@contextmanager
def known_id(folder: Path | None, file_name: str) -> Iterator[KnownId]:
    """Yield the id of the run that the folder's file has, to be changed; other processes wait meanwhile.

    Args:
        folder: the folder; without one the id is kept nowhere.
        file_name: the file.

    Raises:
        UserError: the file cannot be written, or is none of the folder's own.
    """
    if folder is None:
        yield KnownId(None)
        return
    path = folder / file_name
    try:
        check_own(folder, (file_name,), ())
        with locked(path, lambda: None):
            with open(path, encoding="utf-8", errors="replace", opener=own_file) as file:
                known = KnownId(_id_in(file.read()))
            before = known.value
            yield known
            if known.value != before:
                with open(path, "w", encoding="utf-8", opener=own_file) as file:
                    file.write(json.dumps({"run_id": known.value}) + "\n")
    except OSError as error:
        raise unwritable(folder, error) from error


def _id_in(text: str) -> str | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = found.get("run_id") if isinstance(found, dict) else None
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


class Courier:
    """Takes points and pictures to a tracker, in a thread of its own: training never waits for a server.

    What fails is tried again with what comes later, and once more in the end.

    Args:
        tracker: a tracker that is open.
        every_s: seconds between two deliveries.
    """

    def __init__(self, tracker: Tracker, every_s: float = SEND_EVERY_S) -> None:
        self._tracker, self._every_s = tracker, every_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._points: list[Point] = []
        self._jobs: list[Callable[[], None]] = []
        self._problem: str | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"courier to {tracker.NAME}", daemon=True)
        self._thread.start()

    def add(self, samples_seen: int, values: Mapping[str, float]) -> None:
        """Take a point along. Values at the same samples that are still here are laid over by it."""
        now_ms = int(time.time() * 1000)
        with self._lock:
            before = self._points.pop().values if self._points and self._points[-1][0] == samples_seen else {}
            self._points.append(Point(samples_seen, now_ms, {**before, **values}))

    def do(self, job: Callable[..., None], *arguments: Any) -> None:
        """Take a call of a tracker's method along, behind the points that are here."""
        with self._lock:
            self._pack()
            self._jobs.append(partial(job, *arguments))

    def problem(self) -> str | None:
        """Return a sentence on the first delivery that failed, once."""
        with self._lock:
            said, self._problem = self._problem, None
        return said

    def finish(self, timeout_s: float = END_S) -> list[str]:
        """Deliver what is left and end the thread, within that time. Returns sentences on what did not arrive."""
        self._over.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive() and not self._jobs:
            return []
        problem = self.problem()
        why = " in time" if self._thread.is_alive() else ""
        return [*([problem] if problem else []), f"{self._tracker.NAME} did not take everything{why}."]

    def close(self) -> None:
        """End the thread; what takes longer than seconds is left. Does not raise."""
        self.finish(_CLOSE_S)

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            self._deliver(is_last=False)
        self._deliver(is_last=True)

    def _deliver(self, *, is_last: bool) -> None:
        with self._lock:
            self._pack()
            jobs, self._jobs = self._jobs, []
        left = []
        for number, job in enumerate(jobs):
            try:
                job()
            except Exception as error:  # whatever a service, its package and the network raise
                self._failed(error)
                left.append(job)
                if not is_last:
                    left += jobs[number + 1 :]
                    break
        with self._lock:
            self._jobs[:0] = left

    def _pack(self) -> None:
        if self._points:
            self._jobs.append(partial(self._tracker.log, self._points))
            self._points = []

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._has_failed:
                self._has_failed = True
                said = without_password(one_line(error).rstrip("."))
                self._problem = (
                    f"{self._tracker.NAME} takes nothing ({said}); training goes on, and what it misses is sent again."
                )
