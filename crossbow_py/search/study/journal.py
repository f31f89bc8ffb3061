"""A search's journal: Optuna's records as lines of one file, which any process of a host may append at any time.

The format is that of Optuna's own journal files, so that its dashboard reads them. What differs is what a crash leaves:
Optuna's next writer appends to a line that was torn, which makes the whole file unreadable, and waits half a minute for
the lock file of a process that was killed. Here a torn line, which no reader has counted, is cut off before the next is
written, and the kernel drops the lock with its holder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import BaseJournalBackend

from crossbow_py.core.errors import SearchError, UserError
from crossbow_py.core.file_locks import locked

_POLL_S = 0.002
BEGIN = b'{"op_code":'  # of every record


class StorageError(SearchError):
    """The storage of a search cannot be used, or what it holds cannot be read; what was finished stays in it."""


class BadStorageError(StorageError, UserError):
    """A storage holds what no worker of this search has written."""

    exit_code = 2

    def __init__(self, place: str, found: str) -> None:
        super().__init__(
            f"the search's storage {place} holds what this search cannot have written: {found}; restore it from a "
            "copy, or give another storage."
        )


class JournalFile(BaseJournalBackend):
    """Records as JSON lines of the file `path`, made where there is none.

    Safe for any number of processes of one host, each with its own object. On network file systems it is as safe as
    their locks are: for several hosts a data base is the better storage.

    Args:
        path: absolute, or in the working folder of now.
        lock_wait_s: how long another process may write before it counts as stuck.

    Raises (all methods):
        OSError: the file is gone, was cut, cannot be read or written, or is locked by another process for now.
        BadStorageError: a line in it is no record.
    """

    def __init__(self, path: Path, lock_wait_s: float = 5.0) -> None:
        self._path, self._lock_wait_s = path.resolve(), lock_wait_s  # it may be a link of the user's
        self._starts = [0]  # in bytes, of each record read so far and of the one to come
        self._path.touch()

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """All whole records from the given one on. A last line without its end is still being written, or was torn."""
        with self._path.open("rb") as file:
            self._require_what_was_read(os.fstat(file.fileno()).st_size)
            file.seek(self._starts[log_number_from])
            lines = file.read().split(b"\n")[:-1]
        records = [self._parsed(line, log_number_from + index) for index, line in enumerate(lines)]
        for index, line in enumerate(lines, start=log_number_from):
            if index + 1 == len(self._starts):
                self._starts.append(self._starts[index] + len(line) + 1)
        return records

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; they are on the disk when this returns."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._require_what_was_read(self._path.stat().st_size)  # before the lock, which would make a new file
        with self._exclusive(), self._path.open("a+b") as file:
            self._cut_torn_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _cut_torn_line(self, file: IO[bytes]) -> None:
        file.seek(self._starts[-1])
        torn = file.read().rpartition(b"\n")[2]
        if torn:
            if torn[: len(BEGIN)] != BEGIN[: len(torn)]:  # somebody's text, given by mistake
                raise self._damaged("the last line")
            file.truncate(file.tell() - len(torn))

    def _require_what_was_read(self, size: int) -> None:
        if size < self._starts[-1]:
            raise OSError(f"{self._path} was cut or replaced: {self._starts[-1]} bytes had been read, it has {size}")

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "op_code" not in record:
            raise self._damaged(f"line {number + 1}")
        return record

    def _damaged(self, where: str) -> BadStorageError:
        return BadStorageError(str(self._path), f"{where} is no record of a search")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # Not waited for in the kernel, where a stopped process would hold up all others for good.
        until = time.monotonic() + self._lock_wait_s
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(locked(self._path, self._busy))
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_POLL_S)
            yield

    def _busy(self) -> None:
        raise BlockingIOError(f"another process writes to {self._path}")
