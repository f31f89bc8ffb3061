"""The cache of decoded and shrunk images: one memory-mapped file and its index.

    FOLDER/KEY/images.bin    pixels, uint8 [H, W, 3], one image after the other
    FOLDER/KEY/index.npy     int64 [N, 3]: an image's offset, height and width; zeros for an image that is not there

The key is a hash of everything the pixels depend on, so a file never changes. The cache only saves time: an image that
is not in it is decoded when it is needed, with the same result.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from crossbow_py.core.errors import one_line
from crossbow_py.core.file_locks import locked
from crossbow_py.core.files import check_own, sync
from crossbow_py.core.host import read_host
from crossbow_py.core.measured import user_cache
from crossbow_py.data.images.crops import resized_extent
from crossbow_py.data.images.decoding import UnreadableImage, decode, encoded_size, shrunk
from crossbow_py.data.images.folder import ImageFiles
from crossbow_py.data.streaming.worker_processes import start_workers

IMAGES, INDEX = "images.bin", "index.npy"
_FORMAT_VERSION = 1
_POLL_S = 0.5  # seconds between checks of the workers
_CHUNK = 32  # files a worker decodes at a time
_PROBED = 200  # files whose size is read to estimate the room that is needed
_MIB, _GIB = 2**20, 2**30

Pixels = npt.NDArray[np.uint8]
Advance = Callable[[int], None]


def cache_key(files: ImageFiles, short_side: int) -> str:
    """Return a hexadecimal hash of the files (name, size, time of change), the short side, and the decoding libraries.

    Raises OSError if a file is gone.
    """
    stats = np.empty((len(files), 2), dtype=np.int64)
    for index in range(len(files)):
        stat = os.stat(files.path(index))  # noqa: PTH116 - for a million files Path would take twice as long
        stats[index] = stat.st_size, stat.st_mtime_ns
    settings = (_FORMAT_VERSION, short_side, PIL.__version__, torch.__version__, *files.classes)
    parts = (repr(settings).encode(), files.labels.tobytes(), files.ends.tobytes(), files.names, stats.tobytes())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


class ImageCache:
    """A complete cache, opened for reading. Other processes that it is sent to open it again.

    Args:
        folder: FOLDER/KEY.
        count: N, the number of image files.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: the index is damaged or does not match the pixels.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self._count = folder, count
        check_own(folder, (IMAGES, INDEX), ())
        self._index = _read_index(folder / INDEX)
        _check_index(self._index, count, (folder / IMAGES).stat().st_size)
        self._values = _mapped(folder / IMAGES)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all pixels."""
        return len(self._values)

    def pixels(self, file: int) -> Tensor | None:
        """Return uint8 [H, W, 3] of one image, mapped read-only (writing crashes); None if it is not in the cache."""
        begin, height, width = self._index[file].tolist()
        return self._values.as_strided((height, width, 3), (3 * width, 3, 1), begin) if height else None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "count": self._count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["count"])  # type: ignore[misc]


def _read_index(path: Path) -> npt.NDArray[np.int64]:
    """Read the index. Raises OSError, and ValueError for a file that holds no array."""
    try:
        # Mapped first, as `np.load` allocates whatever size the header claims.
        index: npt.NDArray[np.int64] = np.array(np.lib.format.open_memmap(path, mode="r"))
    except OSError:
        raise
    except Exception as error:  # a damaged header can raise nearly anything
        raise ValueError(f"{path} holds no index ({one_line(error)})") from error
    return index


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, mapped; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Torch warns of a read-only tensor. A private writable mapping would count as memory, and one larger than the
        # machine's memory would be refused.
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r"))


def _check_index(index: npt.NDArray[np.int64], count: int, num_bytes: int) -> None:
    """Raise ValueError unless the images follow each other and fill the file."""
    if index.shape != (count, 3) or index.dtype != np.int64 or (index < 0).any():
        raise ValueError(f"the index must be int64 [{count}, 3], got {index.dtype} {list(index.shape)}")
    heights, widths = index[:, 1], index[:, 2]
    # Larger numbers could overflow below and fit by chance.
    if ((heights == 0) != (widths == 0)).any() or (widths > num_bytes // 3 // np.maximum(heights, 1)).any():
        raise ValueError(f"the index has images that do not fit a file of {num_bytes} bytes")
    sizes = 3 * heights * widths
    ends = np.cumsum(sizes)
    if (index[sizes > 0, 0] != (ends - sizes)[sizes > 0]).any() or (ends[-1] if count else 0) != num_bytes:
        raise ValueError(f"the index does not fit a file of {num_bytes} bytes")


class Opened(NamedTuple):
    """The cache, None if training goes on without one, and sentences for the user about it."""

    cache: ImageCache | None
    notes: tuple[str, ...] = ()


class _NoRoom(Exception):  # noqa: N818 - never leaves this module
    """The disk is too small; the message says by how much."""


def open_or_fill(
    files: ImageFiles, short_side: int, folder: Path | None, *, timeout_s: float, progress: bool
) -> Opened:
    """Open the cache of these files with a short side of at most `short_side`, and fill it first if it is not there.

    It is in `folder`, or by default in the user's cache folder. Blocks while another process fills it. Filling stops if
    a worker process takes longer than `timeout_s` for a chunk of files. `progress` shows a bar on stderr. Does not
    raise if the cache fails.
    """
    try:
        folder = folder or user_cache() / "images"
        path = folder / cache_key(files, short_side)
        found = _opened(path, len(files))
        return Opened(found) if found else _fill(files, short_side, path, timeout_s, progress)
    except (_NoRoom, OSError, RuntimeError) as error:  # a DataLoader raises RuntimeError for a worker that died
        reason = str(error) if isinstance(error, _NoRoom) else one_line(error)
        return Opened(
            None,
            (
                f"There is no image cache in {folder or 'the home folder'}: {reason}. Images are decoded in every "
                "epoch; make room, or set data.cache_dir to another folder.",
            ),
        )


def _opened(path: Path, count: int) -> ImageCache | None:
    """Return the cache, None if it is missing or damaged."""
    try:
        return ImageCache(path, count)
    except (OSError, ValueError, EOFError):
        return None


def _fill(files: ImageFiles, short_side: int, path: Path, timeout_s: float, progress: bool) -> Opened:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True, quiet=not progress), disable=not progress)
    task = bar.add_task("image cache", total=len(files))
    with bar, _locked(path.with_suffix(".lock"), lambda text: bar.update(task, description=text)) as waited:
        found = _opened(path, len(files))
        if found:
            return Opened(found, ("Another run filled the image cache while this one waited.",) if waited else ())
        partial = path.with_suffix(".partial")
        for left in (partial, path):  # left by a killed process, and a damaged cache
            shutil.rmtree(left, ignore_errors=True)
        _check_room(files, short_side, path.parent)
        try:
            partial.mkdir()
            _write(files, short_side, partial, timeout_s, lambda count: bar.advance(task, count))
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync(path.parent)
        cache = ImageCache(path, len(files))
    return Opened(cache, (f"The image cache of {files.folder} was filled: {_room(cache.num_bytes)} in {path}.",))


def _check_room(files: ImageFiles, short_side: int, folder: Path) -> None:
    """Raise _NoRoom if the images, estimated from some of them, would not fit."""
    every = max(1, len(files) // _PROBED)
    sizes = [_bytes_of(encoded_size(files.path(index)), short_side) for index in range(0, len(files), every)]
    needed, free = sum(sizes) / len(sizes) * len(files), shutil.disk_usage(folder).free
    if needed > free:
        raise _NoRoom(f"it would take about {_room(needed)}, and {_room(free)} are free")


def _bytes_of(size: tuple[int, int] | None, short_side: int) -> int:
    if size is None:
        return 0
    width, height = size if min(size) <= short_side else resized_extent(*size, short_side)
    return 3 * width * height


def _write(files: ImageFiles, short_side: int, folder: Path, timeout_s: float, advance: Advance) -> None:
    index = np.zeros((len(files), 3), dtype=np.int64)
    begin = position = 0
    with (folder / IMAGES).open("wb") as out:
        for chunk in _decoded(files, short_side, timeout_s):
            for pixels in chunk:
                if pixels is not None:
                    index[position] = begin, *pixels.shape[:2]
                    append(out, pixels)
                    begin += pixels.nbytes
                position += 1
            advance(len(chunk))
        if position != len(files):
            raise RuntimeError(f"{position} of {len(files)} images came from the workers")
    np.save(folder / INDEX, index)
    for path in (folder / IMAGES, folder / INDEX, folder):
        sync(path)


def append(out: IO[bytes], pixels: Pixels) -> None:
    """Write pixels through a file: a full disk then is an OSError, while a mapped file would kill with SIGBUS."""
    out.write(np.ascontiguousarray(pixels).data)


class _Chunks:
    """A data set for a DataLoader: item i is chunk i of the files, decoded and shrunk; None for an unreadable one."""

    def __init__(self, files: ImageFiles, short_side: int) -> None:
        self._files, self._short_side = files, short_side

    def __len__(self) -> int:
        return (len(self._files) + _CHUNK - 1) // _CHUNK

    def __getitem__(self, index: int) -> list[Pixels | None]:
        last = min(len(self._files), (index + 1) * _CHUNK)
        return [self._one(self._files.path(file)) for file in range(index * _CHUNK, last)]

    def _one(self, path: str) -> Pixels | None:
        try:
            return shrunk(decode(path), self._short_side).numpy()
        except UnreadableImage:
            return None  # it is decoded again when it is needed, and the error is reported then


def _decoded(files: ImageFiles, short_side: int, timeout_s: float) -> Iterator[list[Pixels | None]]:
    """Yield chunks in order, decoded by one worker process a core; NumPy arrays need no room in /dev/shm."""
    chunks = _Chunks(files, short_side)
    workers = min(read_host().cores, len(chunks))
    workers = workers if workers > 1 else 0
    return _watched(*start_workers(chunks, workers, min(_POLL_S, timeout_s), batch_size=None), timeout_s)


def _watched(
    batches: Iterator[list[Pixels | None]], workers: Sequence[BaseProcess], timeout_s: float
) -> Iterator[list[Pixels | None]]:
    """Yield the batches. A DataLoader that times out is asked again unless a worker died or `timeout_s` is over."""
    asked_s = came_s = time.monotonic()
    while True:
        try:
            asked_s = time.monotonic()
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError:
            now_s = time.monotonic()
            alive = all(worker.is_alive() for worker in workers)
            if not alive or now_s - asked_s < _POLL_S or now_s - came_s > timeout_s:
                raise
            continue
        came_s = time.monotonic()
        yield batch


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock, and yield whether another process held it first."""
    waits: list[bool] = []

    def busy() -> None:
        waits.append(True)
        say("another run is filling the image cache")

    with locked(path, busy):
        say("filling the image cache")
        yield bool(waits)


def _room(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
