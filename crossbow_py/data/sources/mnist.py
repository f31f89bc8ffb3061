"""MNIST (Y. LeCun, C. Cortes, C. Burges) and Fashion-MNIST (H. Xiao et al., arXiv 1708.07747): gzipped IDX files."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import setting
from crossbow_py.data.augmentation import FLIP_HELP, Flip
from crossbow_py.data.datasets import Data, Pair
from crossbow_py.data.sources.base import DownloadedSettings
from crossbow_py.data.sources.downloads import REPLACE, PublishedFile, data_folders, download, find, read_file, unpacked

_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_UNSIGNED_BYTE = 0x08


class IdxSettings(DownloadedSettings):
    """Settings that the two data sets share: the same four files, in a folder named like the data set."""

    SHAPE = (1, 28, 28)
    NUM_TRAIN = 60_000
    NUM_TEST = 10_000
    MIRRORS: ClassVar[tuple[str, ...]]
    MD5: ClassVar[dict[str, str]]

    def read(self, progress: bool) -> tuple[Data, Data]:
        """Return (train, test). Each file is searched for, and downloaded if it is missing, by itself."""
        return self._part("train", progress), self._part("t10k", progress)

    def _part(self, part: str, progress: bool) -> Pair:
        image_path, label_path = (self._locate(f"{part}-{kind}", progress) for kind in (_IMAGES, _LABELS))
        images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels) or len(labels) == 0:
            rule = f"data files {image_path} and {label_path} must hold n images 28 x 28 and n labels"
            raise UserError(f"{rule}, got shapes {images.shape} and {labels.shape}; {REPLACE}.")
        if labels.max() >= self.CLASSES:
            raise UserError(f"data file {label_path} must hold labels from 0 to 9, got {labels.max()}; {REPLACE}.")
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))

    def _locate(self, name: str, progress: bool) -> Path:
        folders, packed = data_folders(self.root), f"{self.NAME}/{name}.gz"
        found = find((packed, f"{self.NAME}/{name}"), folders)
        wanted = PublishedFile(packed, self.MD5[name], tuple(f"{mirror}{name}.gz" for mirror in self.MIRRORS))
        return found or download(wanted, folders, self.download, progress)


class Mnist(IdxSettings):
    """60,000 + 10,000 handwritten digits, 28 x 28 in grey."""

    NAME = "mnist"
    MEAN = (0.1307,)
    STD = (0.3081,)
    MIRRORS = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    MD5: ClassVar[dict[str, str]] = {
        f"train-{_IMAGES}": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        f"train-{_LABELS}": "d53e105ee54ea40749a09fcbcd1e9432",
        f"t10k-{_IMAGES}": "9fb629c4189551a2d022fa330f9573f3",
        f"t10k-{_LABELS}": "ec29112dd5afa0611ce80d1b7f02629c",
    }


@dataclass(frozen=True)
class FashionMnist(IdxSettings):
    """60,000 + 10,000 articles of clothing, 28 x 28 in grey."""

    NAME = "fashion_mnist"
    MEAN = (0.2860,)
    CLASS_NAMES = (
        "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip
    STD = (0.3530,)
    MIRRORS = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    )
    MD5: ClassVar[dict[str, str]] = {
        f"train-{_IMAGES}": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        f"train-{_LABELS}": "25c81989df183df01b3e8a0aad5dffbe",
        f"t10k-{_IMAGES}": "bef4ecab320f06d8554ea6380940ec79",
        f"t10k-{_LABELS}": "bb300cfdad3c16e7a12a480ee83cd310",
    }

    flip: Flip = setting(True, FLIP_HELP)


def read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in .gz. The array owns its memory.

    Layout: two zero bytes, the type, the number of axes, their lengths (big-endian 32 bits), the values.

    Raises:
        UserError: it is no such file, or not as long as its header says.
    """
    content = read_file(path)
    content = unpacked(content, path) if path.suffix == ".gz" else content
    try:
        lengths = struct.unpack_from(f">{ndim}I", content, 4)
    except struct.error as error:
        raise UserError(f"data file {path} is truncated or damaged ({one_line(error)}); {REPLACE}.") from error
    if content[:4] != bytes((0, 0, _UNSIGNED_BYTE, ndim)):
        raise UserError(f"data file {path} must be an IDX file of bytes with {ndim} axes, but is not; {REPLACE}.")
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * ndim)
    if len(values) != math.prod(lengths):
        raise UserError(f"data file {path} must hold {lengths} values, got {len(values)} in all; {REPLACE}.")
    if not len(values):
        raise UserError(f"data file {path} must hold at least one value, got none; {REPLACE}.")
    return values.reshape(lengths).copy()
