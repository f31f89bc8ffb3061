"""Files that are written whole or not at all, by any number of processes at a time."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yields where to write what becomes `path` when the block ends; when it raises, that is removed.

    Any number of processes, also of several hosts that share the folder, may do so at a time: the last one wins.

    Args:
        path: the file; its folder is there.
        synced: whether the file and its name are on the disk when the block has ended. Else a power cut may leave it
            torn or empty.

    Raises:
        OSError: the disk refuses.
    """
    # Nobody else's; and without the file's name in it, as TensorBoard reads all that has `tfevents` in its name.
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
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
