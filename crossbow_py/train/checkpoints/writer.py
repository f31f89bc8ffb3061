"""Writes checkpoints during training, in one thread per rank. A checkpoint appears once all parts are written.

    checkpoints/.samples-000000320000.TOKEN-1.partial/rank-0.pt       being written: hidden, never read
    checkpoints/.samples-000000320000.TOKEN-1.partial/rank-0.sha256   hash of a part that is complete on disk

Every rank writes its part into the hidden folder and fsyncs it. Once all have, the first rank writes the manifest and
renames the folder, so that a crash at any moment leaves the checkpoints there were before. `checkpoint` has the format.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

import torch

from crossbow_py.core.errors import one_line
from crossbow_py.core.files import sync
from crossbow_py.train.checkpoints.checkpoint import FOLDER, FORMAT_VERSION, MANIFEST, checkpoints, part_name

Status = Literal["idle", "writing", "written", "failed"]
# A piece is hashed and written while it is still in a cache. Both release the interpreter's lock; larger pieces would
# save nothing, and smaller ones would need the lock more often, which a training thread may hold.
_PIECE = 2**20
_HASH = ".sha256"
_HERE, _RENAME_EXCHANGE = -100, 2  # constants of Linux's fcntl.h and fs.h


class CheckpointWriter:
    """Writes one rank's parts in a background thread; on the first rank, also concludes checkpoints.

    All ranks call `begin`, `conclude` and `discard` in the same order; in between each reads its own `status`, and they
    decide together. One thread per rank calls the methods; `status`, `error` and `newest` may be read from any.

    Args:
        run_folder: the run's folder, shared by all ranks.
        keep: how many of the newest checkpoints to keep.
        rank, num_ranks: the rank that writes, and the number of ranks.
        token: equal on all ranks that were started together and different for every start, so that parts of a killed
            start are never mistaken for those of this one.

    Attributes:
        error: the reason why the status is `failed`.
        newest: the last checkpoint that this writer concluded; None on all ranks but the first.
    """

    def __init__(self, run_folder: Path, keep: int, rank: int = 0, num_ranks: int = 1, token: str = "alone") -> None:
        self._parent = run_folder / FOLDER
        self._run_folder, self._keep = run_folder, keep
        self._rank, self._num_ranks, self._token = rank, num_ranks, token
        self._samples_seen, self._number = 0, 0  # of the part that was begun last
        self._status: Status = "idle"
        self.error: OSError | None = None
        self.newest: Path | None = None
        self._changed = threading.Condition()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Status] | None] = queue.SimpleQueue()

    @property
    def status(self) -> Status:
        """The status: `writing` while the thread is busy, `written` or `failed` after a part, else `idle`."""
        return self._status

    def begin(self, state: Mapping[str, Any], samples_seen: int) -> None:
        """Write this rank's part in the background. The status becomes `written` or `failed`.

        The tensors of `state` belong to the writer from now on, and are released once they are on disk.
        """
        self.wait()
        assert self._status == "idle", f"a part was {self._status} and neither concluded nor discarded"
        self._samples_seen, self._number = samples_seen, self._number + 1
        self._given_up = threading.Event()
        folder, given_up = self._partial, self._given_up
        self._do(lambda: self._write_part(folder, state, given_up), "written")

    def conclude(self) -> None:
        """Make a checkpoint of the parts, once all ranks have `written` theirs.

        The first rank does so in the background and drops checkpoints that the new one replaces: the oldest beyond
        `keep`, and those with more samples, which are left over from before the run resumed from an older checkpoint or
        started afresh in this folder. The status becomes `idle` or `failed`; on other ranks it is `idle` at once.
        """
        assert self._status == "written", f"the part is {self._status}"
        if self._rank == 0:
            folder, samples_seen = self._partial, self._samples_seen
            self._do(lambda: self._conclude(folder, samples_seen), "idle")
        else:
            self._status = "idle"

    def discard(self) -> None:
        """Discard the part that was begun last, in the background, as some rank failed. The status becomes `idle`."""
        self._given_up.set()
        if self._number:
            folder = self._partial
            self._do(lambda: self._remove_part(folder), "idle")

    def wait(self) -> None:
        """Block until the status is not `writing`."""
        with self._changed:
            self._changed.wait_for(lambda: self._status != "writing")

    def close(self) -> None:
        """End the thread. A part that is being written is given up; a conclusion is completed."""
        self._given_up.set()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    @property
    def _partial(self) -> Path:
        """The hidden folder. The number tells it from an earlier attempt at the same samples, which was discarded."""
        return self._parent / f".{folder_name(self._samples_seen)}.{self._token}-{self._number}.partial"

    def _do(self, task: Callable[[], None], then: Status) -> None:
        with self._changed:
            self._status, self.error = "writing", None
            self._tasks.put((task, then))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (asked := self._tasks.get()) is not None:
            task, status = asked
            error: OSError | None = None
            try:
                task()
            except Exception as failure:  # of any kind, as the training loop must know
                error, status = _without_traceback(failure), "failed"
            del asked, task  # releases the state before the status says that it is written
            with self._changed:
                if self._tasks.empty():
                    self._status, self.error = status, error
                    self._changed.notify_all()

    def _write_part(self, folder: Path, state: Mapping[str, Any], given_up: threading.Event) -> None:
        if self._parent.is_symlink():
            raise OSError(f"{self._parent} is a link, not a folder")
        for path in self._parent.glob(".samples-*") if self._rank == 0 else ():
            # Left behind by a crash; other ranks of this start may have begun their parts.
            if self._num_ranks == 1 or f".{self._token}-" not in path.name:
                shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / part_name(self._rank)
        partial = final.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                hashing = _HashingFile(file, given_up)
                try:
                    torch.save(dict(state), hashing)  # type: ignore[arg-type]
                except RuntimeError as error:
                    raise hashing.refusal or OSError(one_line(error)) from error
                file.flush()
                os.fsync(file.fileno())
            partial.rename(final)
            final.with_suffix(_HASH).write_text(hashing.sha256.hexdigest(), encoding="utf-8")
        except Exception:
            with suppress(OSError):
                partial.unlink()  # frees space on a full disk
            raise

    def _conclude(self, folder: Path, samples_seen: int) -> None:
        parts = [folder / part_name(rank) for rank in range(self._num_ranks)]
        manifest = {
            "format_version": FORMAT_VERSION,
            "samples_seen": samples_seen,
            "num_ranks": self._num_ranks,
            "sha256": {part.name: part.with_suffix(_HASH).read_text(encoding="utf-8") for part in parts},
        }
        for part in parts:
            part.stat()
            part.with_suffix(_HASH).unlink()
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        sync(folder / MANIFEST)
        sync(folder)
        final = self._parent / folder_name(samples_seen)
        _put(folder, final)
        self.newest = final
        found = checkpoints(self._run_folder)
        older = [path for path in found if path.name < final.name]
        for path in found:
            if path != final and path not in older[: self._keep - 1]:
                # Hidden first, so that a crash does not leave a damaged checkpoint.
                _remove(_hide(path, self._parent / f".{path.name}.{self._token}-{self._number}.dropped"))

    def _remove_part(self, folder: Path) -> None:
        with suppress(OSError):
            for path in folder.glob(f"rank-{self._rank}.*"):
                path.unlink()
        if self._rank == 0:
            _remove(folder)
        with suppress(OSError):  # it is gone, or has files of other ranks
            folder.rmdir()


def save(run_folder: Path, state: Mapping[str, Any], samples_seen: int, keep: int) -> Path:
    """Write a checkpoint of one rank and wait for it. Returns its folder; it replaces others as in `conclude`.

    Raises OSError if it cannot be written; earlier checkpoints are then untouched.
    """
    writer = CheckpointWriter(run_folder, keep)
    try:
        writer.begin(state, samples_seen)
        writer.wait()
        if writer.status == "written":
            writer.conclude()
            writer.wait()
        if error := writer.error:
            writer.discard()
            writer.wait()
            raise error
    finally:
        writer.close()
    assert writer.newest is not None, "a checkpoint concluded without an error has a folder"
    return writer.newest


def folder_name(samples_seen: int) -> str:
    """Return the name of a checkpoint's folder; names sort by samples."""
    return f"samples-{samples_seen:012d}"


class _HashingFile:
    """A file for torch.save that hashes what is written to it."""

    def __init__(self, file: IO[bytes], given_up: threading.Event) -> None:
        self.sha256 = hashlib.sha256()
        self.refusal: OSError | None = None
        self._file, self._given_up = file, given_up

    def write(self, data: bytes | memoryview) -> int:
        whole = memoryview(data)
        try:
            for begin in range(0, len(whole), _PIECE):
                if self._given_up.is_set():
                    raise OSError("given up")
                piece = whole[begin : begin + _PIECE]
                self.sha256.update(piece)
                self._file.write(piece)
        except OSError as error:
            self.refusal = error  # torch raises another error, without the reason
            raise
        return len(whole)

    def flush(self) -> None:
        self._file.flush()


def _without_traceback(error: Exception) -> OSError:
    """Return the error without what would keep the state in memory."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    return OSError(str(error) if isinstance(error, OSError) else one_line(error))


def _put(folder: Path, final: Path) -> None:
    """Rename the folder of a checkpoint to its final name, in place of another one that has it."""
    replaced: Path | None = None
    if not final.exists():
        folder.rename(final)
    elif _exchange(folder, final):
        replaced = folder
    else:
        replaced = _hide(final, folder.with_suffix(".replaced"))
        folder.rename(final)
    sync(final.parent)
    if replaced:
        _remove(replaced)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically. Returns False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(path) for path in (first, second))
    return rename is not None and rename(_HERE, next(names), _HERE, next(names), _RENAME_EXCHANGE) == 0


def _hide(path: Path, hidden: Path) -> Path:
    """Rename a folder before it is removed. Returns its new path."""
    with suppress(OSError):
        return path.rename(hidden)
    return path


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
