"""Who has started this process: torchrun starts ranks anew, with the same command, after one of them has ended."""

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
_RUN_ID = "TORCHELASTIC_RUN_ID"
_PROC = Path("/proc")
_SET_PARENT_DEATH_SIGNAL = 1  # as Linux has it in prctl.h
_STARTED = 19  # of what /proc/PID/stat says behind the name: the time the process began, in ticks since the boot


@dataclass(frozen=True)
class Launch:
    """One launch: what --rdzv-id says (torchrun has a word for none), and the process of every host's torchrun.

    Ranks that were started anew are of the launch with which they share one of these processes: a torchrun outlives the
    ranks it starts, and where hosts leave and others come, one that stayed tells. The name alone tells nothing, as a
    second command may be given it again; nor does the number of a process, which comes again (see `process_name`).
    """

    run_id: str
    launchers: Sequence[str]

    def is_same(self, other: Launch) -> bool:
        """Whether both are one launch."""
        return self.run_id == other.run_id and not set(self.launchers).isdisjoint(other.launchers)


def this_launch(ranks: Ranks = ALONE) -> Launch | None:
    """The launch the ranks belong to; None where torchrun has not started them. Blocks until all have come to it."""
    run_id = os.environ.get(_RUN_ID)
    launchers = ranks.gather_texts("" if run_id is None else process_name(os.getppid()))
    return None if run_id is None else Launch(run_id, sorted(set(launchers)))


def process_name(pid: int, proc: Path = _PROC) -> str:
    """A process of this host as no other is called: the host, its boot, the number, and the time it began.

    Containers start with equal host names and equal numbers. Where the kernel does not tell the boot and the time, as
    on macOS, the host and the number must do.
    """
    name = f"{socket.gethostname()}:{pid}"
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        started = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[_STARTED]
    except (OSError, IndexError):
        return name
    return f"{name}:{boot}:{started}"


def end_with_launcher() -> None:
    """On Linux, SIGTERM comes to this process when torchrun, if that has started it, ends; or now, if that has ended.

    torchrun ends its ranks with itself, unless it is killed. They would train on, hold the run's folder, and be in the
    way of those that are started in their place.
    """
    if sys.platform == "linux" and _RUN_ID in os.environ:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if is_adopted(os.getppid()):
            signal.raise_signal(signal.SIGTERM)


def is_adopted(parent: int, proc: Path = _PROC) -> bool:
    """Whether a launcher has ended and left its process to `parent`: to process 1, while launchers are Python.

    In a container, process 1 may be the launcher itself. Which program another user's process runs is not told.
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
    """Say in a run's folder who has started it. Raises OSError."""
    with replacing(folder / LAUNCH_FILE) as partial:
        partial.write_text(json.dumps(asdict(launch)), encoding="utf-8")


def is_of_launch(folder: Path, launch: Launch) -> bool:
    """Whether the run in a folder belongs to this launch."""
    try:
        return Launch(**json.loads(read_text(folder / LAUNCH_FILE))).is_same(launch)
    except (OSError, ValueError, TypeError):
        return False
