"""A cluster of Ray as a place for jobs. All that is known of Ray is here, and imported once a cluster is asked for.

So is what Ray does not promise to keep: `ray._private.worker._worker_logs_enabled`, tried with Ray 2.60.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from crossbow_py.cli.launchers import LaunchError, ray_worker
from crossbow_py.cli.launchers.crew import Ended, Lost
from crossbow_py.cli.launchers.placement import AUTO, Machine, RayLauncher, Share
from crossbow_py.cli.launchers.ray_worker import JobHolder
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import shown
from crossbow_py.core.signals import EXIT_TERMINATED

_CHOICE = f"{RayLauncher.GROUP}={RayLauncher.NAME}"
_LOCAL = "local"  # Ray's name of a cluster that it starts on this machine
_STDERR = 2
_ANSWER_S = 5.0
_LONGEST_REASON = 200
_STORE_BYTES = 80 * 2**20  # about the least that Ray takes: nothing but command lines and answers goes through it


@dataclass(frozen=True)
class PlacedJob:
    """A job for a process elsewhere: a command line and the folder to run it in.

    Attributes:
        command: the command, such as train.
        words: its command line.
        folder: its current folder.
        mark: a file; whether it is seen there says whether folders are shared.
    """

    command: str
    words: Sequence[str]
    folder: str
    mark: str | None = None


@dataclass(frozen=True)
class Place:
    """The machine where a process was placed, and whether it has the folder and sees the mark of `PlacedJob`."""

    machine: str
    has_folder: bool
    sees_mark: bool

    @property
    def host(self) -> str:
        """The machine's name for people."""
        return self.machine.partition(" ")[0]


@contextmanager
def connected(launcher: RayLauncher) -> Iterator[RayCluster]:
    """Connect to the cluster, or start one of this machine for as long as the block runs.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or torchrun has started this process.
        LaunchError: Ray cannot start on this machine.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f'{_CHOICE} needs Ray, which is not installed; run pip install "crossbow_py[ray]".')
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"{_CHOICE} starts processes, and so does torchrun; leave one of them out.")
    _check_answers(launcher)
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        raise UserError(f"{_CHOICE} connects to Ray, and this process has done so; start the command by itself.")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            _connect(ray, launcher)
        finally:  # Ray has put its own there
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _connect(ray: Any, launcher: RayLauncher) -> None:
    is_local = launcher.address is None
    own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES} if is_local else {}
    if not is_local:
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # a single try, of at most 41 s
    ray._private.worker._worker_logs_enabled = False  # it would print what befalls its nodes, besides what is said here
    try:
        with _silenced():
            ray.init(address=launcher.address or _LOCAL, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # of many kinds, by what is wrong
        if is_local:
            raise LaunchError(_CHOICE, error) from error
        raise _no_cluster(str(launcher.address), error) from error


@contextmanager
def _silenced() -> Iterator[None]:
    """Send nowhere what Ray's own threads write to stderr on the way to an error, which is raised besides."""
    kept, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


def _check_answers(launcher: RayLauncher) -> None:
    """Raise UserError if nothing answers at the address: Ray itself would try for minutes."""
    address = launcher.address
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or None
    if address is not None and "://" in address:
        remedy = "start the command on a machine of the cluster, for example by ray job submit"
        raise UserError(f"RAY_ADDRESS must be HOST:PORT, got {shown(address)}; {remedy}.")
    if address is None or ":" not in address:  # Ray finds it, or says why not
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> UserError:
    said = one_line(error)[:_LONGEST_REASON].rstrip(".")
    remedy = "start one by ray start --head, or leave launcher.address out for one of this machine alone"
    return UserError(f"launcher.address={address}: no Ray cluster can be reached ({said}); {remedy}.")


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def machines(self) -> list[Machine]:
        """Return the machines that are alive."""
        found = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [Machine(float(each.get("CPU", 0)), float(each.get("GPU", 0))) for each in found]

    def start(self, share: Share, job: PlacedJob, check: Callable[[Place], None]) -> RayProcess:
        """Have Ray find a place for a job, which starts there once `check` has been called with the place.

        What `check` raises comes out of `RayProcess.poll`.
        """
        # By value: what holds a job has then neither torch to import nor its memory to keep.
        self._ray.cloudpickle.register_pickle_by_value(ray_worker)
        holder = self._ray.remote(JobHolder).options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD",
        )  # fmt: skip
        return RayProcess(self._ray, holder.remote(), share, job, check)


class RayProcess:
    """A job's process somewhere in the cluster; see `JobProcess`.

    Args:
        ray: the module.
        holder: Ray's handle of a `JobHolder`, which may still wait for its place.
        share: what it has of a machine.
        job: what to start.
        check: called with its place.
    """

    def __init__(
        self, ray: Any, holder: Any, share: Share, job: PlacedJob, check: Callable[[Place], None]
    ) -> None:  # fmt: skip
        self._ray, self._holder, self._share, self._job, self._check = ray, holder, share, job, check
        self._is_placed = self._has_printed = self._is_given_up = False
        self._asked = self._ask_again()

    @property
    def is_placed(self) -> bool:
        """Return whether a place has been found for it."""
        return self._is_placed

    @property
    def has_printed(self) -> bool:
        """Return whether it has printed anything, by the last `poll`."""
        return self._has_printed

    def poll(self) -> Ended | Lost | None:
        """Return how it has ended; None while it runs, or waits for a place. Raises what `check` does."""
        if self._is_given_up:
            return Ended(EXIT_TERMINATED)
        ready, _ = self._ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(self._asked)
        except errors.ActorUnavailableError:  # for a moment: who cannot be reached may still live
            self._asked = self._ask_again()
            return None
        except errors.RayError as error:
            return Lost(_reason(error))
        if self._is_placed:
            return self._ended(answer)
        self._begin(answer)
        return None

    def _begin(self, answer: tuple[str, bool, bool]) -> None:
        job, place = self._job, Place(*answer)
        if not place.has_folder:
            lacks = f"machine {place.host} of the Ray cluster has no folder {job.folder}, where the command was started"
            raise UserError(f"{lacks}; start it in one that all machines have.")
        self._check(place)
        self._is_placed = True
        on_gpu, threads = self._share.gpus > 0, self._share.cpus
        self._asked = self._holder.begin.remote(job.command, job.folder, list(job.words), on_gpu, threads)

    def _ended(self, answer: tuple[int | None, bool, str, str]) -> Ended | None:
        code, self._has_printed, out, err = answer
        if code is not None:
            return Ended(code, out, err)
        self._asked = self._ask_again()
        return None

    def _ask_again(self) -> Any:
        holder, job = self._holder, self._job
        return holder.poll.remote() if self._is_placed else holder.look.remote(job.folder, job.mark)

    def stop(self) -> None:
        """Send it SIGTERM, or give it up if it has no place yet."""
        if self._is_placed:
            self._holder.stop.remote()
        else:
            self._is_given_up = True

    def close(self) -> None:
        """Give its place to others. Does not raise."""
        with suppress(Exception):
            self._ray.kill(self._holder)


def _reason(error: BaseException) -> str:
    """Return the last line of what Ray says of a loss: those before are about the object that held the job."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1][:_LONGEST_REASON].rstrip(".")
