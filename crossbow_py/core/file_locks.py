"""Files as locks between processes, which the kernel drops with the process that holds one, also when it is killed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from crossbow_py.core.own_files import own_file

_held: set[TextIO] = set()  # and those about to be locked
_changing = threading.Lock()  # a process that another thread forks is to find all open ones there


@contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock `path`, a file that is made where there is none.

    Processes that are forked meanwhile do not hold it: data workers outlive a killed run by seconds, and it is to be
    taken up again at once.

    Args:
        path: the file.
        busy: called when another process holds it; the lock is then waited for, unless this raises.

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
    """Whether another process holds it, or it cannot be written."""
    try:
        with open(path, "a", opener=own_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def is_held(path: Path) -> bool:
    """Whether another process holds it, found out without making or changing anything."""
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
        file.close()  # not an unlocking, which would be the parent's too
    _held.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_let_go)
