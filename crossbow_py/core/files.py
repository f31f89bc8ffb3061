"""Paths that the user gives; files written whole or not at all, that are no links, pipes or devices; and locks.

Somebody else may have filled the folder of a run, a search or a cache. Writing through a link in it would change a file
elsewhere, and opening a pipe blocks. The folder itself, which the user names, may be a link; the files in it may not.
A lock is a file that the kernel unlocks when the process that holds it ends, even if it is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from crossbow_py.core.errors import UserError

_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, as Linux and its file systems have it
_LONGEST_SHOWN = 40
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
_held: set[TextIO] = set()  # also files about to be locked
_changing = threading.Lock()  # taken by a fork too, so that the child finds every open lock file in _held


def own_file(path: str, flags: int) -> int:
    """Open a regular file, as the `opener` of `open`. Raises OSError at once for a link, a pipe or a device."""
    # Checked by its descriptor, so that nothing can be put in the file's place between the check and the use.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", path)
    return descriptor


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises OSError and UnicodeDecodeError."""
    with open(path, encoding="utf-8", opener=own_file) as file:
        return file.read()


def check_own(folder: Path, files: Collection[str], folders: Collection[str]) -> None:
    """Raise OSError for an entry that is not a regular file, or a folder of regular files. It may be missing."""
    for name in files:
        _check(folder / name, "a file")
    for name in folders:
        _check(folder / name, "a folder")
        for root, inner, leaves in os.walk(folder / name):
            for leaf in (*inner, *leaves):
                _check(Path(root, leaf), "a file", "a folder")


def _check(path: Path, *kinds: str) -> None:
    try:
        found = _kind(path.lstat().st_mode)
    except FileNotFoundError:  # another process may have removed its own file
        return
    if found not in kinds:
        raise OSError(errno.EINVAL, f"{path} is {found}, not {kinds[0]}", str(path))


def _kind(mode: int) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` when the block ends and is removed if it raises.

    Several processes, also on hosts that share the folder, may do so at a time: the last one wins.

    Args:
        path: the file, in a folder that exists.
        synced: wait until the file and its name are on the disk. Without it a power cut may leave it torn or empty.

    Raises:
        OSError: the disk refuses.
    """
    # The name is unique, and without that of the file: TensorBoard reads every file with `tfevents` in its name.
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        yield partial
        if synced:
            sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # a full disk needs the room
    if synced:
        sync(path.parent)


def sync(path: Path) -> None:
    """Block until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def given_path(key: str, given: str | Path) -> Path:
    """Return the path that the user gave for `key`, with `~` expanded. It need not exist.

    Raises UserError for a path that no file can have: too long, with a null character, or of an unknown user's home.
    """
    path = str(given)
    shown = f"{path[:_LONGEST_SHOWN]}..." if len(path) > _LONGEST_SHOWN else path
    if "\0" in path:
        raise UserError(f"{key} must be a path, got {path!r}, which has a null character; leave it out.")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={shown} is in the home folder of an unknown user; write the whole path.") from error
    names = [os.fsencode(path), *map(os.fsencode, expanded.parts)]
    if len(names[0]) > _LONGEST_PATH or max(map(len, names[1:]), default=0) > _LONGEST_NAME:
        rule = f"names of at most {_LONGEST_NAME} bytes and {_LONGEST_PATH} in all"
        raise UserError(f"{key} must have {rule}, got {shown!r}; choose a shorter one.")
    return expanded


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
