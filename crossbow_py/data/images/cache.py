"""The cache of images that are decoded and made smaller: one memory-mapped file, and an index of it.

    FOLDER/KEY/images.bin    pixels, uint8 [H, W, 3], one image after the other
    FOLDER/KEY/index.npy     int64 [N, 3]: where an image begins, its height and width; zeros for one that is not there

The key is a hash of everything the pixels depend on, so a file is never changed once it stands there. The cache saves
time and nothing else: what is not in it is decoded when it is needed, with the same result.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import torch
from torch import Tensor

from crossbow_py.core.errors import one_line
from crossbow_py.core.files import check_own
from crossbow_py.data.images.folder import ImageFiles

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
