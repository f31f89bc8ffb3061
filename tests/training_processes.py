"""The command line's training in processes that are killed, starved and cut off by what the system itself offers."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.train.checkpoints.checkpoint import checkpoints
from experiments.bench.machine import ROOT, free_port
from experiments.faults import processes
from experiments.faults.processes import Start
from tests.trainers import measured, weights

PATIENCE_S = 90.0
POLL_S = 0.002
DIGITS = [
    "+experiment=digits", "model.hidden=[32]", "device=cpu", "precision=fp32", "num_learners=2",
    "schedule=constant", "checkpoint_every_epochs=null", "checkpoint_every_s=0.05", "resume=auto",
    "distributed.timeout_s=30",
]  # fmt: skip
_CLONE_NEWNS = 0x00020000


def is_root() -> bool:
    """Whether namespaces can be made and disks mounted."""
    tools = all(shutil.which(tool) for tool in ("mount", "umount", "nsenter", "ip"))
    return sys.platform == "linux" and os.geteuid() == 0 and tools and _may_unshare()


def _may_unshare() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def started(folder: Path, *options: str, num_ranks: int = 2, executor: str = "serial") -> Iterator[Start]:
    """The ranks of a run in `folder`, which leave no process behind."""
    folder.mkdir(exist_ok=True)
    arguments = [*DIGITS, f"executor={executor}", f"output_dir={folder}", *options]
    begun = processes.start(arguments, folder / "output.log", num_ranks)
    try:
        yield begun
    finally:
        for process in begun.processes:
            process.kill()
            process.join()


def train(folder: Path, *options: str, num_ranks: int = 2, **kwargs: Any) -> list[int | None]:
    """Exit codes of a run that is left alone."""
    with started(folder, *options, num_ranks=num_ranks, **kwargs) as begun:
        return begun.wait(PATIENCE_S)


def await_true(
    what: Callable[[], Any], begun: Start | subprocess.Popen[Any] | multiprocessing.process.BaseProcess | None = None
) -> None:
    """Block until it is; not longer than those who are to make it so run."""
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        runs = begun is None or _runs(begun)
        assert (runs or what()) and time.monotonic() < end_s, "what was waited for did not come"
        time.sleep(POLL_S)


def _runs(begun: Start | subprocess.Popen[Any] | multiprocessing.process.BaseProcess) -> bool:
    if isinstance(begun, subprocess.Popen):
        return begun.poll() is None
    return begun.runs if isinstance(begun, Start) else begun.is_alive()


def await_checkpoints(folder: Path, number: int, begun: Start | subprocess.Popen[Any]) -> None:
    """Block until so many new ones were written."""
    seen: set[str] = {path.name for path in checkpoints(folder)}
    known = len(seen)

    def enough() -> bool:
        seen.update(path.name for path in checkpoints(folder))
        return len(seen) - known >= number

    await_true(enough, begun)


def said(folder: Path) -> str:
    """All that its processes have printed."""
    return (folder / "output.log").read_text(encoding="utf-8")


def outcome(folder: Path) -> tuple[bytes, list[tuple[Any, ...]]]:
    """Model and metrics of a run that has ended, for comparison with another's."""
    return weights(folder), measured(folder)


def start_with_own_mounts(arguments: Sequence[str], log: Path, rank: int, num_ranks: int, shared: Path) -> Start:
    """As `processes.start`, but one rank sees `shared` by a mount of its own, which others' do not follow."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    begun = []
    for each in range(num_ranks):
        environment = processes.rank_environment(each, num_ranks, port)
        process = context.Process(
            target=_train_apart, args=(list(arguments), environment, str(log), str(shared) if each == rank else "")
        )
        process.start()
        begun.append(process)
    return Start(tuple(begun))


def _train_apart(arguments: list[str], environment: Mapping[str, str], log: str, shared: str) -> None:
    if shared:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        for command in (["--make-rprivate", "/"], ["--bind", shared, shared]):
            subprocess.run(["mount", *command], check=True)
    processes.train_here(arguments, environment, log)


def inside(pid: int, *command: str) -> bool:
    """Run a command in the mount namespace of a process; whether it succeeded."""
    entered = ["nsenter", f"--target={pid}", "--mount", "--", *command]
    return subprocess.run(entered, capture_output=True, check=False).returncode == 0


def environment(**extra: str) -> dict[str, str]:
    """Of a process that imports this checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


@contextlib.contextmanager
def popen(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `folder`/output.log, killed in the end."""
    folder.mkdir(exist_ok=True)
    with (folder / "output.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder.parent, env=dict(env), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def children(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in text.split()]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
