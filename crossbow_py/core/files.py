"""Paths the user gives, files that are written whole or not at all, and files that are no links, pipes or devices.

Somebody else may have filled the folder of a run, a search or a cache. Writing through a link in it would change a file
elsewhere, and opening a pipe blocks. The folder itself, which the user names, may be a link; the files in it may not.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

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
