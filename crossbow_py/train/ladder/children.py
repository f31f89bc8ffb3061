"""Child processes with a time limit, of which nothing is left when they end, and what their end means."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from crossbow_py.core.files import read_text
from crossbow_py.engine.trust import Outcome

# A launcher's words for its own ranks: a child that finds them would wait for ranks that never come.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
              "MASTER_PORT")  # fmt: skip
_LAUNCHERS_OWN = ("TORCHELASTIC_", "ROLE_", "PET_")
# The signals of a process that is at fault itself. Others come from outside, such as SIGKILL if the host lacks memory.
_OWN_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_LONGEST_REASON = 300
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class Ended:
    """The end of a child.

    Attributes:
        code: the exit code; minus a signal's number if that ended it, None if it was killed at its limit.
        seconds: the time it took.
    """

    code: int | None
    seconds: float


def run_child(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command, its output in `log`, for at most `limit_s` seconds; then, whatever happens, kill its whole group.

    At the limit its processes get SIGUSR1, and a second to write where they are. `environment` is laid over this
    process's. Raises OSError if the command cannot be started.
    """
    begun = time.monotonic()
    with open(log, "wb") as output:
        child = start(command, environment, stdin=subprocess.DEVNULL, stdout=output)
        return _end_of(child, begun, limit_s)


def start(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, stdout: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own, with what it says to stderr in `stdout`; see `run_child`."""
    inherited = {name: value for name, value in os.environ.items() if not _is_launchers(name)}
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True,
        env={**inherited, **environment},
    )  # fmt: skip


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child's whole group, and wait for the child."""
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _end_of(child: subprocess.Popen[bytes], begun: float, limit_s: float) -> Ended:
    code: int | None = None
    try:
        code = child.wait(limit_s)
        seconds = time.monotonic() - begun
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - begun
        _signal_group(child, signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LAST_WORDS_S)
    finally:
        kill(child)
    return Ended(code, seconds)


class ReadyChildren:
    """Runs commands as `run_child`; while one runs, the next process of the same module imports what it will need.

    Args:
        prefix: what the commands begin with. Alone, without arguments, it starts a process that waits for a line on
            its stdin: `{"arguments": [...], "environment": {...}, "log": ...}`. Others are run as they are.
    """

    def __init__(self, prefix: Sequence[str]) -> None:
        self._prefix, self._ready = list(prefix), list[subprocess.Popen[bytes]]()

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> Ended:
        """Run a command, see `run_child`."""
        length = len(self._prefix)
        if list(command[:length]) != self._prefix:
            return run_child(command, environment, log, limit_s)
        child = self._ready.pop() if self._ready else None
        with contextlib.suppress(OSError):  # a full machine starts the next one when it is needed
            self._ready.append(start(self._prefix, environment, subprocess.PIPE, subprocess.DEVNULL))
        begun = time.monotonic()
        if child is not None:
            line = json.dumps({"arguments": command[length:], "environment": environment, "log": str(log)})
            with contextlib.suppress(OSError):  # it has ended
                assert child.stdin is not None, "it was started with a pipe"
                with child.stdin as its_input:
                    its_input.write(f"{line}\n".encode())
                return _end_of(child, begun, limit_s)
            kill(child)
        return run_child(command, environment, log, limit_s)

    def close(self) -> None:
        """Kill the process that waits."""
        while self._ready:
            child = self._ready.pop()
            assert child.stdin is not None, "it was started with a pipe"
            child.stdin.close()
            kill(child)


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a child, and to what it has started: data workers, ranks."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _is_launchers(name: str) -> bool:
    return name in _LAUNCHERS or name.startswith(_LAUNCHERS_OWN)


def outcome_of(ended: Ended, result: Path, log: Path, proves: tuple[str, ...]) -> Outcome:
    """Return what the end of a child means. It has written `result`: {"reason": ..., "may_change": ...}.

    It has passed if it ended with 0 and gives no reason why not. A failure that says nothing of the device may change:
    a child that was killed from outside, or that did not come to try.
    """
    reason, may_change = _result_in(result)
    if ended.code is None:
        reason, may_change = f"timed out after {ended.seconds:.0f} s", False
    elif ended.code < 0:
        reason = f"killed by signal {-ended.code} ({_signal_name(-ended.code)})"
        may_change = -ended.code not in _OWN_FAULTS
    elif reason is None:
        last = next((line.strip() for line in reversed(_lines(log)) if line.strip()), "no output")
        reason, may_change = f"ended with exit code {ended.code} and without a result: {last}", True
    if ended.code == 0 and not reason:
        return Outcome("passed", seconds=ended.seconds, proves=proves)
    reason = " ".join((reason or f"ended with exit code {ended.code}").split())
    return Outcome("failed", reason[:_LONGEST_REASON], ended.seconds, proves, may_change)


def _result_in(result: Path) -> tuple[str | None, bool]:
    """Return the child's reason, empty if it has none and None if it has not come to say so."""
    try:
        plain = json.loads(read_text(result))
        return str(plain["reason"]), bool(plain["may_change"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _lines(log: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
