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
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from crossbow_py.core.errors import DataError, one_line, text_of
from crossbow_py.core.file_locks import locked
from crossbow_py.core.files import check_own, sync
from crossbow_py.core.host import read_host
from crossbow_py.core.measured import user_cache
from crossbow_py.data.images.crops import resized_extent
from crossbow_py.data.images.decoding import UnreadableImage, decode, encoded_size, shrunk
from crossbow_py.data.images.folder import ImageFiles
from crossbow_py.data.streaming.loader import Loader
from crossbow_py.data.streaming.streamed_data import Key, Loaded, OnSample, StreamedData

IMAGES, INDEX = "images.bin", "index.npy"
_FORMAT_VERSION = 1
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


def open_or_fill(
    files: ImageFiles, short_side: int, folder: Path | None, *, timeout_s: float, progress: bool
) -> Opened:
    """Open the cache of these files with a short side of at most `short_side`, and fill it first if it is not there.

    It is in `folder`, or by default in the user's cache folder. Blocks while another process fills it. Filling stops if
    a worker process takes longer than `timeout_s` for an image. `progress` shows a bar on stderr. Does not raise if the
    cache fails.
    """
    try:
        folder = folder or user_cache() / "images"
        path = folder / cache_key(files, short_side)
        found = _opened(path, len(files))
        return Opened(found) if found else _fill(files, short_side, path, timeout_s, progress)
    except (DataError, OSError) as error:
        reason = text_of(error).rstrip(".") if isinstance(error, DataError) else one_line(error)
        note = (
            f"There is no image cache in {folder or 'the home folder'}: {reason}. Images are decoded in every epoch; "
            "make room, or set data.cache_dir to another folder."
        )
        return Opened(None, (note,))


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
    task = bar.add_task("filling the image cache", total=len(files))

    def busy() -> None:
        bar.update(task, description="another run is filling the image cache")

    with bar, locked(path.with_suffix(".lock"), busy):
        found = _opened(path, len(files))
        if found:
            return Opened(found, ("Another run filled the image cache while this one waited.",))
        bar.update(task, description="filling the image cache")
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
    """Raise DataError if the images, estimated from some of them, would not fit."""
    every = max(1, len(files) // _PROBED)
    sizes = [_bytes_of(encoded_size(files.path(index)), short_side) for index in range(0, len(files), every)]
    needed, free = sum(sizes) / len(sizes) * len(files), shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"it would take about {_room(needed)}, and {_room(free)} are free")


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
    np.save(folder / INDEX, index)
    for path in (folder / IMAGES, folder / INDEX, folder):
        sync(path)


def append(out: IO[bytes], pixels: Pixels) -> None:
    """Write pixels through a file: a full disk then is an OSError, while a mapped file would kill with SIGBUS."""
    out.write(np.ascontiguousarray(pixels).data)


class _ShrunkImages(StreamedData):
    """Images decoded and shrunk, as NumPy arrays, which need no room in /dev/shm; None for an unreadable one."""

    def __init__(self, files: ImageFiles, short_side: int, timeout_s: float) -> None:
        self._files, self._short_side, self.timeout_s = files, short_side, timeout_s

    def __len__(self) -> int:
        return len(self._files)

    def fetch(
        self, keys: Sequence[Key], *, seed: int, training: bool, on_sample: OnSample, out: Tensor | None = None
    ) -> Loaded:
        images: list[Pixels | None] = []
        for key in keys:
            on_sample(key.sample)
            try:
                images.append(shrunk(decode(self._files.path(key.sample)), self._short_side).numpy())
            except UnreadableImage:
                images.append(None)  # it is decoded again when it is needed, and the error is reported then
        return Loaded(images, torch.empty(0))

    def name_of(self, sample: int) -> str:
        return self._files.path(sample)

    def subset(self, ids: npt.NDArray[np.int64]) -> StreamedData:
        raise NotImplementedError


def _decoded(files: ImageFiles, short_side: int, timeout_s: float) -> Iterator[list[Pixels | None]]:
    """Yield the images in order, chunk by chunk, decoded by one worker process a core. Raises DataError."""
    keys = [Key(0, file) for file in range(len(files))]
    chunks = [keys[first : first + _CHUNK] for first in range(0, len(keys), _CHUNK)]
    cores = min(read_host().cores, len(chunks))
    loader = Loader(
        _ShrunkImages(files, short_side, timeout_s), chunks, batch_size=_CHUNK, seed=0, training=False,
        num_workers=cores if cores > 1 else 0, pins=False,
    )  # fmt: skip
    try:
        for loaded in loader:
            yield loaded.inputs
    except DataError:
        loader.kill()  # one that hangs would keep the others from closing
        raise
    finally:
        loader.close()


def _room(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
