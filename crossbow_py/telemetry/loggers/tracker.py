"""The interface of a tracking service, and the courier that calls it in a thread of its own.

A tracker has one run open at a time. The listener that records a run or a search opens it; after that the courier's
thread alone calls its methods.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from crossbow_py.core.errors import UserError, unwritable, without_query_password
from crossbow_py.core.files import check_own, locked, own_file
from crossbow_py.telemetry.events import Images

Plain = bool | int | float | str

SEND_EVERY_S = 10.0
RUNNING = "running"
END = "how it ended"  # the name of the call that ends the run
END_S = 60.0  # how long the end of a run waits for the service
_CLOSE_S = 10.0
_TRIES = 3
_LONGEST_SHOWN = 200
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# User and password up to the last @, as either may have one, and a slash: in doubt too much is hidden.
_PASSWORD = re.compile(r"(?<=://)(?:[^/@\s:]*:[^@\s]*@(?:[^?\s]*@)?|[^/@\s]*@(?:[^/?\s]*@)?)")


@dataclass(frozen=True)
class Subject:
    """The run or search that is recorded.

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

    def check(self) -> None:
        """Raise UserError for settings that no run begins with, seconds before `open` would."""

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
        """End the run with its final figures.

        The status is that of a run's or a search's summary, or RUNNING: others that share the run go on with it.
        """


@contextmanager
def refusing(tracker: Tracker, where: str, remedy: str) -> Iterator[None]:
    """Raise UserError, without passwords, for whatever a service raises when a run begins."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"logger=[{tracker.KEY}]: {where} cannot record the run ({_shown(error)}); {remedy}, or leave "
            f"{tracker.KEY} out."
        ) from error


def _shown(error: Exception) -> str:
    """Return an error's type and the first line of its text, without passwords; of a long one its beginning and end."""
    first, *_ = str(error).strip().splitlines() or [""]
    text = without_password(f"{type(error).__name__}: {first}".rstrip(":. "))
    half = _LONGEST_SHOWN // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]} ... {text[-half:]}"


def without_password(address: str) -> str:
    """Return an address, or a text with some, without the user and the password in it."""
    return without_query_password(_PASSWORD.sub("", address))


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
    with ExitStack() as stack:
        with _refusing_folder(folder):
            check_own(folder, (file_name,), ())
            stack.enter_context(locked(path, lambda: None))
            with open(path, encoding="utf-8", errors="replace", opener=own_file) as file:
                known = KnownId(_id_in(file.read()))
        before = known.value
        yield known
        if known.value != before:
            # Over the old id, at once: a full disk or a kill must not leave the file without one. It is not replaced,
            # as others wait for the lock that this very file is.
            with _refusing_folder(folder), open(path, "r+", encoding="utf-8", opener=own_file) as file:
                file.write(json.dumps({"run_id": known.value}) + "\n")
                file.truncate()


@contextmanager
def _refusing_folder(folder: Path) -> Iterator[None]:
    """Raise UserError where the folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(folder, error) from error


def _id_in(text: str) -> str | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = found.get("run_id") if isinstance(found, dict) else None
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


@dataclass(eq=False)
class _Job:
    """A call of a tracker's method.

    Attributes:
        name: what it takes along; None for points, which are never left out.
        tries: how often it failed where the service took something else.
        error: what it failed with last.
    """

    name: str | None
    call: Callable[[], None]
    tries: int = 0
    error: str = ""

    @property
    def what(self) -> str:
        """What it takes along, for the user."""
        return self.name or "points"


def _last_of_each(jobs: Sequence[_Job]) -> list[_Job]:
    """Return all points, and of other things the last of each name: those do not grow while a service is gone."""
    last = {job.name: job for job in jobs}
    return [job for job in jobs if job.name is None or last[job.name] is job]


class Courier:
    """Delivers points and pictures to a tracker in a thread of its own: training never waits for a server.

    MLflow's own queue takes metrics alone, and W&B's never reports a failure, so this thread stands before both. What
    fails keeps nothing back. It is tried again with what comes later, and once more in the end. What the service
    refuses a few times, while it takes other things, is left out, except for points. While it takes nothing, all points
    wait, and of other things the last of each name.

    Args:
        tracker: a tracker that is open.
        every_s: seconds between two deliveries.
    """

    def __init__(self, tracker: Tracker, every_s: float = SEND_EVERY_S) -> None:
        self._tracker, self._every_s = tracker, every_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._points: list[Point] = []
        self._jobs: list[_Job] = []
        self._turn = 0  # deliveries so far
        self._problem: str | None = None
        self._has_failed = False
        self._losses: list[str] = []
        self._left_out: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"courier to {tracker.NAME}", daemon=True)
        self._thread.start()

    def add(self, samples_seen: int, values: Mapping[str, float]) -> None:
        """Take a point along. Values at the same samples that are still here are laid over by it."""
        now_ms = int(time.time() * 1000)
        with self._lock:
            before = self._points.pop().values if self._points and self._points[-1][0] == samples_seen else {}
            self._points.append(Point(samples_seen, now_ms, {**before, **values}))

    def do(self, name: str, job: Callable[..., None], *arguments: Any) -> None:
        """Take a call of a tracker's method along, behind the points that are here; the user knows it by its name.

        One that failed is not made any more after a later one of the same name.
        """
        with self._lock:
            self._pack()
            self._jobs.append(_Job(name, partial(job, *arguments)))

    def problems(self) -> list[str]:
        """Return a sentence on the first delivery that failed, and on whatever is left out, each once."""
        with self._lock:
            said = [*([self._problem] if self._problem else []), *self._losses]
            self._problem, self._losses = None, []
        return said

    def finish(self, timeout_s: float = END_S) -> list[str]:
        """Deliver what is left and end the thread, within that time. Returns sentences on what did not arrive."""
        self._over.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return [*self.problems(), f"{self._tracker.NAME} did not take everything in time."]
        self._problem = None  # nothing is sent again any more
        if not self._jobs:
            return self.problems()
        what = ", ".join(dict.fromkeys(job.what for job in self._jobs))
        return [*self.problems(), f"{self._tracker.NAME} did not take {what} ({self._jobs[0].error})."]

    def close(self) -> None:
        """End the thread; what takes longer than seconds is left. Does not raise."""
        self.finish(_CLOSE_S)

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            self._deliver()
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            self._pack()
            jobs, self._jobs = self._jobs, []
        left, takes_some = self._sent([job for job in jobs if job.name != END])
        if ending := [job for job in jobs if job.name == END]:
            if left:  # once more, while there is a run to send to
                left, takes_more = self._sent(left, takes_some)
                takes_some = takes_some or takes_more
            left += self._sent(ending)[0]
        with self._lock:
            waiting = left if takes_some else _last_of_each(left)
            self._jobs[:0] = [job for job in waiting if not self._leaves_out(job, takes_some)]

    def _sent(self, jobs: Sequence[_Job], takes_some: bool = False) -> tuple[list[_Job], bool]:
        """Make calls. Returns those that are left, and whether the service took anything.

        Until it does, two deliveries of points are tried for all of them: the first, and another one each time.
        """
        points = [job for job in jobs if job.name is None]
        asked = {*points[:1], *points[1 + self._turn % max(1, len(points) - 1) :][:1]}
        self._turn += 1
        gone, held = set[_Job](), list[_Job]()
        for index, job in enumerate(jobs):
            if job.name is None and not takes_some and job not in asked:
                held.append(job)
            elif self._is_taken(job):
                takes_some = True
                gone |= {job, *(each for each in jobs[:index] if each.name == job.name and job.name is not None)}
        if takes_some:
            gone |= {job for job in held if self._is_taken(job)}
        return [job for job in jobs if job not in gone], takes_some

    def _is_taken(self, job: _Job) -> bool:
        try:
            job.call()
        except Exception as error:  # whatever a service, its package and the network raise
            job.error = _shown(error)
            self._tell_first(job)
            return False
        return True

    def _pack(self) -> None:
        if self._points:
            self._jobs.append(_Job(None, partial(self._tracker.log, self._points)))
            self._points = []

    def _tell_first(self, job: _Job) -> None:
        with self._lock:
            if not self._has_failed and not self._over.is_set():
                self._has_failed = True
                self._problem = (
                    f"{self._tracker.NAME} did not take {job.what} ({job.error}); training goes on, and what it "
                    "misses is sent again."
                )

    def _leaves_out(self, job: _Job, takes_some: bool) -> bool:
        job.tries += takes_some  # a service that takes nothing may be back later
        if job.name is None or job.tries < _TRIES:
            return False
        if job.name not in self._left_out:
            self._left_out.add(job.name)
            self._losses.append(
                f"{self._tracker.NAME} did not take {job.name} ({job.error}), tried {_TRIES} times; it is left out."
            )
        return True
