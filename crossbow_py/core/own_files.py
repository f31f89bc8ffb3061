"""Files of a run, a search or a cache that are what they seem: never links, pipes or devices.

Such a folder may be somebody else's. Through a link in it one would write or remove something elsewhere, and a pipe
keeps whoever opens it waiting. The folder itself, which the user names, may be a link; what is in it may not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def own_file(path: str, flags: int) -> int:
    """An opener for `open`: of regular files alone, without following a link or waiting for a pipe.

    Raises OSError.
    """
    # What is no file is told from its descriptor: nothing can take its place in between.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", path)
    return descriptor


def read_text(path: Path) -> str:
    """The text of a regular file. Raises OSError, and UnicodeDecodeError."""
    with open(path, encoding="utf-8", opener=own_file) as file:
        return file.read()


def check_own(folder: Path, files: Collection[str], folders: Collection[str]) -> None:
    """Raise OSError unless what is there of these is a regular file, or a folder that holds nothing else."""
    for name in files:
        _check(folder / name, "a file")
    for name in folders:
        _check(folder / name, "a folder")
        for path in _beneath(folder / name):
            _check(path, "a file", "a folder")


def _check(path: Path, *kinds: str) -> None:
    try:
        found = _kind(path.lstat().st_mode)
    except FileNotFoundError:  # another process may remove its own files meanwhile
        return
    if found not in kinds:
        raise OSError(errno.EINVAL, f"{path} is {found}, not {kinds[0]}", str(path))


def _beneath(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(root, name)


def _kind(mode: int) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")
