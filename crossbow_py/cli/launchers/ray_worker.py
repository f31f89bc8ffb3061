"""A job's process on the machine that Ray has chosen, and the object of Ray that holds it there.

It is no process of Ray itself, so that the job is there what it is alone: signals, threads, device and exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from crossbow_py.cli.commands import run_command
from crossbow_py.core.version import PACKAGE
from crossbow_py.distributed.launch import end_with_parent

_MOST_KEPT = 200_000  # bytes of what a job prints, the last ones; console.log has all
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Answer = tuple[int | None, bool, str, str]  # of `JobHolder.poll`


class JobHolder:
    """Holds one job's process. Ray makes one in a process of its own, and calls one method at a time there."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = dict(os.environ)  # Ray's, with the GPU of this holder; later calls may not have that
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  which live as long

    def look(self, folder: str, mark: str | None) -> tuple[str, bool, bool]:
        """Return the name of this machine, whether it has the folder to run in, and whether it sees the file `mark`."""
        return machine_name(), Path(folder).is_dir(), mark is not None and Path(mark).exists()

    def begin(self, command: str, folder: str, words: Sequence[str], on_gpu: bool, threads: int) -> Answer:
        """Start the job in a folder, and return what `poll` does. It is killed with the process that this is in.

        Args:
            command: the command, such as train.
            folder: its current folder.
            words: its command line.
            on_gpu: whether it may use the GPU that Ray has reserved for it; otherwise it sees none.
            threads: its share of the cores, unless this machine's OMP_NUM_THREADS says otherwise.
        """
        program = [sys.executable, "-m", "crossbow_py.cli.launchers.ray_worker", str(os.getpid())]
        self._process = subprocess.Popen(
            [*program, command, *words], cwd=folder, env=_environment(self._environment, on_gpu, threads),
            stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err,
            start_new_session=True,  # a Ctrl-C in the terminal is for whoever started all jobs, who then stops them
        )  # fmt: skip
        return self.poll()

    def poll(self) -> Answer:
        """Return the exit code, None while it runs; whether it has printed anything; and in the end what it printed."""
        if self._process is None:
            raise RuntimeError("its process was not started")
        code = self._process.poll()
        has_printed = os.fstat(self._out.fileno()).st_size > 0
        return (None, has_printed, "", "") if code is None else (code, has_printed, _end(self._out), _end(self._err))

    def stop(self) -> None:
        """Send SIGTERM, at which training stops and is saved."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def machine_name() -> str:
    """Return a name of this machine: its host name and, where the kernel says, its boot."""
    return f"{socket.gethostname()} {boot_id()}"


def boot_id() -> str:
    """Return the kernel's name of this boot, which containers share; empty where there is none."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _environment(given: Mapping[str, str], on_gpu: bool, threads: int) -> dict[str, str]:
    """Return the variables of a job, by those of the process that holds it."""
    found = {"OMP_NUM_THREADS": str(max(1, threads)), **given}
    root = str(PACKAGE.parent)
    if root != sysconfig.get_paths()["purelib"]:  # a checkout, which whoever started the jobs had on its path
        found["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [found.get("PYTHONPATH")])])
    return found if on_gpu else {**found, "CUDA_VISIBLE_DEVICES": ""}


def _end(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_KEPT))
    return file.read().decode(errors="replace")


def main(argv: Sequence[str]) -> int:
    """Be the job: `argv` has the holder's process, the command, and its command line. Return the exit code."""
    holder, command, *words = argv
    end_with_parent(signal.SIGKILL)  # at once: whoever takes its place must not find it at work
    if os.getppid() != int(holder):  # which has ended before that
        signal.raise_signal(signal.SIGKILL)
    return run_command(command, words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
