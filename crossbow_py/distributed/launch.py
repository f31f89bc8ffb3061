"""Launches: which torchrun started this process. It restarts all ranks, with the same command, after one has ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crossbow_py.core.files import read_text, replacing
from crossbow_py.distributed.ranks import ALONE, Ranks

LAUNCH_FILE = ".launch"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # variables of every rank
_RUN_ID = "TORCHELASTIC_RUN_ID"
_PROC = Path("/proc")
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl.h
_STARTED = 19  # field of /proc/PID/stat after the name: the time the process began, in ticks since the boot


def launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    return all(name in os.environ for name in LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


@dataclass(frozen=True)
class Launch:
    """A launch: its --rdzv-id (torchrun uses "none" by default), and the process of torchrun on every host.

    Restarted ranks belong to a launch if they share one of its processes: a torchrun outlives the ranks it starts, and
    where some hosts are replaced, one that stayed is enough. The id alone is not, as a second command may be given the
    same; nor is the number of a process, which is used again (see `process_name`).
    """

    run_id: str
    launchers: Sequence[str]

    def is_same(self, other: Launch) -> bool:
        """Return whether both are one launch."""
        return self.run_id == other.run_id and not set(self.launchers).isdisjoint(other.launchers)


def this_launch(ranks: Ranks = ALONE) -> Launch | None:
    """Return the ranks' launch, None if torchrun has not started them. Blocks until all ranks have called it."""
    run_id = os.environ.get(_RUN_ID)
    launchers = ranks.gather_texts("" if run_id is None else process_name(os.getppid()))
    return None if run_id is None else Launch(run_id, sorted(set(launchers)))


def process_name(pid: int, proc: Path = _PROC) -> str:
    """Return a unique name of a process on this host: the host, its boot, the process's number, and its start time.

    Containers may have equal host names and equal numbers. Without the boot and the time, as on macOS, the name is the
    host and the number.
    """
    name = f"{socket.gethostname()}:{pid}"
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        started = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[_STARTED]
    except (OSError, IndexError):
        return name
    return f"{name}:{boot}:{started}"


def end_with_launcher() -> None:
    """Have Linux send SIGTERM to this process when the torchrun that started it ends, or now if it has ended.

    torchrun ends its ranks when it ends, unless it is killed. They would then train on, hold the run's folder, and get
    in the way of the ranks that replace them.
    """
    if sys.platform == "linux" and _RUN_ID in os.environ:
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: int) -> None:
    """Have Linux send a signal to this process when the one that started it ends, or now if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
        if is_adopted(os.getppid()):
            signal.raise_signal(number)


def is_adopted(parent: int, proc: Path = _PROC) -> bool:
    """Return whether a launcher has ended and left its process to `parent`: to process 1, which is not Python.

    In a container, process 1 may be the launcher itself. The program of another user's process cannot be read.
    """
    if parent != 1:
        return False
    try:
        return "python" not in (proc / "1" / "exe").readlink().name
    except PermissionError:
        return True
    except OSError:
        return False


def write_launch(folder: Path, launch: Launch) -> None:
    """Write the launch into the folder of a run. Raises OSError."""
    with replacing(folder / LAUNCH_FILE) as partial:
        partial.write_text(json.dumps(asdict(launch)), encoding="utf-8")


def is_of_launch(folder: Path, launch: Launch) -> bool:
    """Return whether the run in a folder belongs to this launch."""
    try:
        return Launch(**json.loads(read_text(folder / LAUNCH_FILE))).is_same(launch)
    except (OSError, ValueError, TypeError):
        return False
