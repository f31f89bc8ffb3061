"""NVIDIA's multi-process service: a daemon of the suite's own, and K processes under it that are measured as one side.

The daemon has its pipes and logs in a temporary folder and serves only processes that are told of it; one that runs
already is not asked for anything. None of this has run on a GPU yet.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from experiments.throughput.gate import Ready, Visit, Window
from experiments.throughput.peers import MPS, PlannedPeers
from experiments.throughput.sides import Side
from experiments.throughput.workers import SideError, SideProcess
from experiments.throughput.workloads import Effort, Workload

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = Path("/tmp/nvidia-mps")
_PID_FILE = f"{CONTROL}.pid"
_PATIENCE_S = 10.0


class MpsError(Exception):
    """No daemon could be had; why, in a sentence."""


def why_not() -> str | None:
    """What speaks against a daemon of our own here; None when it may be tried."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} was not found"
    if os.environ.get(PIPES):
        return f"{PIPES} is set, so these processes are under an MPS daemon already"
    if (_USUAL_PIPES / "control").exists():
        return f"an MPS daemon seems to run already, as there is {_USUAL_PIPES / 'control'}"
    return None


@contextmanager
def daemon() -> Iterator[str]:
    """Start a daemon and give its pipe directory; it is ended on leaving. Raises MpsError."""
    if reason := why_not():
        raise MpsError(reason)
    with tempfile.TemporaryDirectory(prefix="mps") as name:
        folder = Path(name)
        environment = _environment(folder / "pipes", folder / "logs")
        said = folder / "said.txt"
        try:
            with said.open("w") as output:  # not a pipe: the daemon would hold it open
                started = subprocess.run(
                    [CONTROL, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    timeout=_PATIENCE_S, check=False,
                )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{CONTROL} -d did not start a daemon ({error})") from error
        if started.returncode:
            words = " ".join(said.read_text().split()) or f"exit code {started.returncode}"
            raise MpsError(f"{CONTROL} -d did not start a daemon ({words})")
        try:
            yield environment[PIPES]
        finally:
            _end(environment)


def with_daemon(planned: PlannedPeers, stack: ExitStack) -> tuple[PlannedPeers, str]:
    """The peers that are left, and the pipe directory of a daemon for them, which ends with `stack`."""
    if MPS not in planned.sides:
        return planned, ""
    try:
        return planned, stack.enter_context(daemon())
    except MpsError as error:
        return planned.without(MPS, str(error)), ""


def has_server(pipes: str) -> bool:
    """Whether processes have connected: the daemon starts a server with the first. Others run on without MPS."""
    try:
        return bool(_ask("get_server_list", {**os.environ, PIPES: pipes}).strip())
    except (OSError, subprocess.SubprocessError):
        return False


def _environment(pipes: Path, logs: Path) -> dict[str, str]:
    for folder in (pipes, logs):
        folder.mkdir()
    environment = {**os.environ, PIPES: str(pipes), LOGS: str(logs)}
    # The daemon would number the devices anew, and its processes would count again among those.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _ask(command: str, environment: dict[str, str]) -> str:
    words = f"{command}\n"
    done = subprocess.run(
        [CONTROL], env=environment, input=words, timeout=_PATIENCE_S, capture_output=True, text=True, check=True
    )
    return done.stdout


def _end(environment: dict[str, str]) -> None:
    """Ask the daemon to quit; one that does not answer is told by a signal."""
    try:
        _ask("quit", environment)
    except (OSError, subprocess.SubprocessError):
        with suppress(OSError, ValueError):
            os.kill(int((Path(environment[PIPES]) / _PID_FILE).read_text()), signal.SIGTERM)


class SideGroup:
    """K processes, each training one model and blocked but for its windows, which all have at the same time.

    Used as a `SideProcess` is.
    """

    def __init__(self, side: Side, workload: Workload, effort: Effort, patience_s: float | None = None) -> None:
        """Start all of them and wait until every one is ready, but no longer than `patience_s`. Raises SideError."""
        self.side = side
        begun_s = time.monotonic()
        with ExitStack() as stack:
            self._members: list[SideProcess] = []
            for _ in range(side.num_learners):
                member = SideProcess(replace(side, num_learners=1), workload, effort, wait=False)
                self._members.append(stack.enter_context(member))
            for member in self._members:
                member.await_ready(_left_s(begun_s, patience_s))
            if not has_server(effort.mps_pipes):
                raise SideError(f"side {side.label}: its processes did not connect to the MPS daemon.")
            self._stack = stack.pop_all()
        first = self._members[0].ready
        self.ready = Ready(first.threads, f"{side.num_learners} processes, {first.detail}")

    def __enter__(self) -> SideGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.dismiss()
        self._stack.close()

    def window(self, visit: Visit, patience_s: float | None = None) -> Window:
        """See SideProcess."""
        begun_s = time.monotonic()
        for member in self._members:
            member.begin(visit)
        return together([member.end(_left_s(begun_s, patience_s)) for member in self._members])

    def dismiss(self) -> None:
        """See SideProcess."""
        for member in self._members:
            member.dismiss()


def start_side(
    side: Side, workload: Workload, effort: Effort, patience_s: float | None = None
) -> SideProcess | SideGroup:
    """What measures a side. Raises SideError."""
    kind = SideGroup if side.side == MPS else SideProcess
    return kind(side, workload, effort, patience_s)


def together(windows: Sequence[Window]) -> Window:
    """Windows of processes that train side by side, as one: rates add up, and what the others took is nobody else's."""
    images = sum(window.images for window in windows)
    own = sum(window.own_share for window in windows)
    busy = [window.foreign_share + window.own_share for window in windows if window.foreign_share is not None]
    foreign = max(0.0, max(busy) - own) if len(busy) == len(windows) else None
    return Window(images, images / sum(window.images_per_s for window in windows), foreign, own)


def _left_s(begun_s: float, patience_s: float | None) -> float | None:
    return None if patience_s is None else max(0.0, patience_s - (time.monotonic() - begun_s))
