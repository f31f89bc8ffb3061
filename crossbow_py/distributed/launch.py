"""Who has started this process: torchrun starts ranks anew, with the same command, after one of them has ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCH_FILE = ".launch"
_NO_NAME = "none"  # what torchrun calls a launch that was given no --rdzv-id
_SET_PARENT_DEATH_SIGNAL = 1  # as Linux has it in prctl.h


@dataclass(frozen=True)
class Launch:
    """One call of torchrun: its name, if it has one, and the process of the first rank's launcher."""

    run_id: str
    launcher: str

    def is_same(self, other: Launch) -> bool:
        """Whether both are one call of torchrun."""
        named = self.run_id != _NO_NAME and self.run_id == other.run_id
        return named or self.launcher == other.launcher


def this_launch() -> Launch | None:
    """The call of torchrun this process belongs to; None where it was started otherwise."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run_id is None else Launch(run_id, f"{socket.gethostname()}:{os.getppid()}")


def end_with_launcher() -> None:
    """On Linux, SIGTERM comes to this process when its launcher ends.

    torchrun ends its ranks with itself, unless it is killed. They would train on, hold the run's folder, and be in the
    way of those that are started in their place.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def write_launch(folder: Path, launch: Launch) -> None:
    """Say in a run's folder who has started it. Raises OSError."""
    (folder / LAUNCH_FILE).write_text(json.dumps(asdict(launch)), encoding="utf-8")


def is_of_launch(folder: Path, launch: Launch) -> bool:
    """Whether the run in a folder was started by this call of torchrun."""
    try:
        return Launch(**json.loads((folder / LAUNCH_FILE).read_text(encoding="utf-8"))).is_same(launch)
    except (OSError, ValueError, TypeError):
        return False
