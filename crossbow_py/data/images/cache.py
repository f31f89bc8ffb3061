"""The cache of images that are decoded and made smaller: one memory-mapped file, and an index of it.

    FOLDER/KEY/images.bin    pixels, uint8 [H, W, 3], one image after the other
    FOLDER/KEY/index.npy     int64 [N, 3]: where an image begins, its height and width; zeros for one that is not there

The key is a hash of everything the pixels depend on, so a file is never changed once it stands there. The cache saves
time and nothing else: what is not in it is decoded when it is needed, with the same result.
"""

from __future__ import annotations

import hashlib
import multiprocessing
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
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from crossbow_py.core.errors import one_line
from crossbow_py.core.file_locks import locked
from crossbow_py.core.files import check_own, sync
from crossbow_py.core.host import read_host
from crossbow_py.core.user_cache import user_cache
from crossbow_py.data.images.crops import resized_extent
from crossbow_py.data.images.decoding import UnreadableImage, decode, encoded_size, shrunk
from crossbow_py.data.images.folder import ImageFiles
from crossbow_py.data.streaming.worker_processes import leave_signals_to_the_run, quiet_start, start_method

_POLL_S = 0.5  # how often one looks whether workers are well
_CHUNK = 32  # files a worker takes at a time
_PROBED = 200  # files whose size tells how much room is needed
_MIB, _GIB = 2**20, 2**30
Pixels = npt.NDArray[np.uint8]
Advance = Callable[[int], None]

IMAGES, INDEX = "images.bin", "index.npy"
_FORMAT_VERSION = 1


def cache_key(files: ImageFiles, short_side: int) -> str:
    """Hexadecimal hash of the files (name, size, time of change), the size they get, and what decodes and resizes them.

    Raises OSError when a file is gone.
    """
    stats = np.empty((len(files), 2), dtype=np.int64)
    for index in range(len(files)):
        stat = os.stat(files.path(index))  # noqa: PTH116 - a million of them, and Path would take as long again
        stats[index] = stat.st_size, stat.st_mtime_ns
    settings = (_FORMAT_VERSION, short_side, PIL.__version__, torch.__version__, *files.classes)
    parts = (repr(settings).encode(), files.labels.tobytes(), files.ends.tobytes(), files.names, stats.tobytes())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


class ImageCache:
    """A cache that is complete, opened for reading. It may be sent to other processes, which open it anew.

    Args:
        folder: FOLDER/KEY.
        count: N, the number of files it is about.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is not what an index says, or the index is none.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self._count = folder, count
        check_own(folder, (IMAGES, INDEX), ())
        self._index = _read_index(folder / INDEX)
        _check_index(self._index, count, (folder / IMAGES).stat().st_size)
        self._values = _mapped(folder / IMAGES)

    @property
    def num_bytes(self) -> int:
        """Of pixels."""
        return len(self._values)

    def pixels(self, file: int) -> Tensor | None:
        """uint8 [H, W, 3] of one image, in the file: writing to it would end the process. None when it is not there."""
        begin, height, width = self._index[file].tolist()
        return self._values.as_strided((height, width, 3), (3 * width, 3, 1), begin) if height else None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "count": self._count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["count"])  # type: ignore[misc]


def _read_index(path: Path) -> npt.NDArray[np.int64]:
    """Raises OSError, and ValueError for a file that holds no array."""
    try:
        # Mapped first: `np.load` makes room for as much as the header says.
        index: npt.NDArray[np.int64] = np.array(np.lib.format.open_memmap(path, mode="r"))
    except OSError:
        raise
    except Exception as error:  # a damaged header can make its reader raise nearly anything
        raise ValueError(f"{path} holds no index ({one_line(error)})") from error
    return index


def _mapped(path: Path) -> Tensor:
    """The bytes of a file; none cannot be mapped."""
    if path.stat().st_size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Torch warns of a tensor that cannot be written to. A private mapping that could be would count as memory, and
        # one larger than the machine's would be refused.
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r"))


def _check_index(index: npt.NDArray[np.int64], count: int, num_bytes: int) -> None:
    """Raise ValueError unless the images lie one after the other and fill the file."""
    if index.shape != (count, 3) or index.dtype != np.int64 or (index < 0).any():
        raise ValueError(f"the index must be int64 [{count}, 3], got {index.dtype} {list(index.shape)}")
    heights, widths = index[:, 1], index[:, 2]
    # Larger numbers could overflow below, and fit by chance.
    if ((heights == 0) != (widths == 0)).any() or (widths > num_bytes // 3 // np.maximum(heights, 1)).any():
        raise ValueError(f"the index has images that do not fit a file of {num_bytes} bytes")
    sizes = 3 * heights * widths
    ends = np.cumsum(sizes)
    if (index[sizes > 0, 0] != (ends - sizes)[sizes > 0]).any() or (ends[-1] if count else 0) != num_bytes:
        raise ValueError(f"the index does not fit a file of {num_bytes} bytes")


class Opened(NamedTuple):
    """The cache, None when training goes on without one, and what the user should know about it."""

    cache: ImageCache | None
    notes: tuple[str, ...] = ()


class _NoRoom(Exception):  # noqa: N818 - not raised at anyone
    """The disk is too small; says by how much."""


def open_or_fill(
    files: ImageFiles, short_side: int, folder: Path | None, *, timeout_s: float, progress: bool
) -> Opened:
    """The cache of these files with a short side of at most `short_side`, filled first where it is not there yet.

    It is in `folder`, or by default in the user's cache folder. Blocks while another process fills it. A worker process
    that takes longer than `timeout_s` over some files ends the filling. `progress` shows it on stderr. Does not raise
    for what is wrong with the cache.
    """
    try:
        folder = folder or user_cache() / "images"
        place = folder / cache_key(files, short_side)
        found = _opened(place, len(files))
        return Opened(found) if found else _fill(files, short_side, place, timeout_s, progress)
    except (_NoRoom, OSError, RuntimeError) as error:  # RuntimeError is how a DataLoader says that a worker died
        reason = str(error) if isinstance(error, _NoRoom) else one_line(error)
        return Opened(
            None,
            (
                f"There is no image cache in {folder or 'the home folder'}: {reason}. Images are decoded in every "
                "epoch; make room, or set data.cache_dir to another folder.",
            ),
        )


def _opened(place: Path, count: int) -> ImageCache | None:
    """None when it is not there or damaged."""
    try:
        return ImageCache(place, count)
    except (OSError, ValueError, EOFError):
        return None


def _fill(files: ImageFiles, short_side: int, place: Path, timeout_s: float, progress: bool) -> Opened:
    place.parent.mkdir(parents=True, exist_ok=True)
    with _bar(len(files), progress) as (advance, say), _locked(place.with_suffix(".lock"), say) as waited:
        found = _opened(place, len(files))
        if found:
            return Opened(found, ("Another run filled the image cache while this one waited.",) if waited else ())
        partial = place.with_suffix(".partial")
        for left in (partial, place):  # of a killed process, and damaged
            shutil.rmtree(left, ignore_errors=True)
        _check_room(files, short_side, place.parent)
        try:
            partial.mkdir()
            _write(files, short_side, partial, timeout_s, advance)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync(place.parent)
        cache = ImageCache(place, len(files))
    return Opened(cache, (f"The image cache of {files.folder} was filled: {_room(cache.num_bytes)} in {place}.",))


def _check_room(files: ImageFiles, short_side: int, folder: Path) -> None:
    """Raise _NoRoom when the images, judged by some of them, would not fit."""
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
    begin = place = 0
    with (folder / IMAGES).open("wb") as out:
        for chunk in _decoded(files, short_side, timeout_s):
            for pixels in chunk:
                if pixels is not None:
                    index[place] = begin, *pixels.shape[:2]
                    append(out, pixels)
                    begin += pixels.nbytes
                place += 1
            advance(len(chunk))
        if place != len(files):
            raise RuntimeError(f"{place} of {len(files)} images came from the workers")
        _flush(out)
    with (folder / INDEX).open("wb") as out:
        np.save(out, index)
        _flush(out)
    sync(folder)


def append(out: IO[bytes], pixels: Pixels) -> None:
    """Write plainly: a full disk is then an OSError, where a mapped file would end the process with SIGBUS."""
    out.write(np.ascontiguousarray(pixels).data)


class _Chunks:
    """As a DataLoader wants it: chunk i of the files, decoded and made smaller; None for those that cannot be read."""

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
            return None  # and tried again when it is needed, which says why


def _decoded(files: ImageFiles, short_side: int, timeout_s: float) -> Iterator[list[Pixels | None]]:
    """Chunk after chunk, in order, by a worker process a core; NumPy arrays, which need no room in /dev/shm."""
    chunks = _Chunks(files, short_side)
    workers = min(read_host().cores, len(chunks))
    workers = workers if workers > 1 else 0
    before = set(multiprocessing.active_children())
    with quiet_start():
        loader: DataLoader[Any] = DataLoader(
            chunks,  # type: ignore[arg-type]  # typed narrower than it works
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            timeout=min(_POLL_S, timeout_s) if workers else 0,
            multiprocessing_context=start_method() if workers else None,
            worker_init_fn=leave_signals_to_the_run,
            generator=Generator(),  # or it would draw from torch's own
        )
        batches = iter(loader)
    return _watched(batches, [child for child in multiprocessing.active_children() if child not in before], timeout_s)


def _watched(
    batches: Iterator[list[Pixels | None]], workers: Sequence[BaseProcess], timeout_s: float
) -> Iterator[list[Pixels | None]]:
    """The same; a DataLoader that times out is asked again: its workers may be dead, or have `timeout_s` to go."""
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


def _as_it_is(chunk: Any) -> Any:
    return chunk


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock; gives whether it had to be waited for."""
    waits: list[bool] = []

    def busy() -> None:
        waits.append(True)
        say("another run is filling the image cache")

    with locked(path, busy):
        say("filling the image cache")
        yield bool(waits)


@contextmanager
def _bar(total: int, show: bool) -> Iterator[tuple[Advance, Callable[[str], None]]]:
    """Functions to advance a bar on stderr, and to say what it shows."""
    if not show:
        yield (lambda _: None), (lambda _: None)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("image cache", total=total)
        yield (
            lambda count: progress.update(task, advance=count),
            lambda text: progress.update(task, description=text),
        )


def _flush(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _room(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
