"""Files as locks between processes. The kernel drops a lock with the process that holds it, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from crossbow_py.core.files import own_file

_held: set[TextIO] = set()  # also files about to be locked
_changing = threading.Lock()  # taken by a fork too, so that the child finds every open lock file in _held


@contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock `path`, a file that is created if it is missing.

    Processes forked meanwhile do not hold it: data workers outlive a killed run by seconds, and its next start must not
    have to wait for them.

    Args:
        path: the file.
        busy: called if another process holds the lock; blocks for the lock afterwards, unless `busy` raises.

    Raises:
        OSError: the file cannot be written.
    """
    with _changing:
        file = open(path, "a", opener=own_file)  # noqa: SIM115
        _held.add(file)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        with _changing:
            file.close()
            _held.discard(file)


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock, or the file cannot be written."""
    try:
        with open(path, "a", opener=own_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def is_held(path: Path) -> bool:
    """Return whether another process holds the lock, without creating or changing the file."""
    try:
        with open(path, "rb", opener=own_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _let_go() -> None:
    for file in _held:
        file.close()  # without unlocking, which would release the parent's lock too
    _held.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_let_go)
