"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

They are read from the folder of pickles, or from the published archive without unpacking it to disk.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.data.augmentation import FLIP_HELP, Flip
from crossbow_py.data.datasets import Data, Pair
from crossbow_py.data.sources.base import CROP_HELP, DownloadedSettings
from crossbow_py.data.sources.downloads import (
    REPLACE,
    PublishedFile,
    check_published,
    data_folders,
    download,
    find,
    read_file,
    unpacked,
)
from crossbow_py.data.sources.pickles import read_pickle

_SHAPE = (3, 32, 32)
Read = Callable[[str], tuple[str, bytes]]  # from the name of a pickle to its path for messages, and its content


@dataclass(frozen=True)
class PublishedBatch:
    """A published pickle: its name, length in bytes and md5."""

    name: str
    length: int
    md5: str


@dataclass(frozen=True)
class CifarSettings(DownloadedSettings):
    """Settings that the two data sets share; each lists its files."""

    SHAPE = _SHAPE
    NUM_TRAIN = 50_000
    NUM_TEST = 10_000
    FOLDER: ClassVar[str]
    ARCHIVE: ClassVar[PublishedFile]
    LABELS: ClassVar[str]
    TRAIN: ClassVar[tuple[PublishedBatch, ...]]
    TEST: ClassVar[tuple[PublishedBatch, ...]]

    crop_padding: int = setting(4, CROP_HELP, minimum=0)
    flip: Flip = setting(True, FLIP_HELP)

    def read(self, progress: bool) -> tuple[Data, Data]:
        """Return (train, test) from the folder or the archive, whichever is found first, else from a download."""
        folders = data_folders(self.root)
        path = find((self.FOLDER, self.ARCHIVE.path), folders)
        if path is None:
            path = download(self.ARCHIVE, folders, self.download, progress)
        read = partial(_read, path) if path.is_dir() else _Archive(path, self.FOLDER).read
        return self._images(read, self.TRAIN), self._images(read, self.TEST)

    def _images(self, read: Read, batches: tuple[PublishedBatch, ...]) -> Pair:
        images, labels = zip(*(self._batch(read, batch) for batch in batches), strict=True)
        return torch.from_numpy(np.concatenate(images).reshape(-1, *_SHAPE)), torch.from_numpy(np.concatenate(labels))

    def _batch(self, read: Read, batch: PublishedBatch) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return images uint8 [n, 3072] and labels int64 [n]. The hash is checked first, then the content."""
        path, content = read(batch.name)
        check_published(content, batch.length, batch.md5, path)
        images, labels = _entries(read_pickle(content, path), self.LABELS)
        if not _are_images(images) or not _are_labels(labels, len(images), self.CLASSES):
            rule = f"'data' uint8 [n, 3072] and n '{self.LABELS}' from 0 to {self.CLASSES - 1}"
            raise UserError(f"data file {path} must hold {rule}, but does not; {REPLACE}.")
        return images, np.asarray(labels, dtype=np.int64)


class Cifar10(CifarSettings):
    """50,000 + 10,000 colour images 32 x 32 of 10 classes."""

    NAME = "cifar10"
    CLASS_NAMES = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    MEAN = (0.4914, 0.4822, 0.4465)
    STD = (0.2470, 0.2435, 0.2616)
    FOLDER = "cifar-10-batches-py"
    ARCHIVE = PublishedFile(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    )
    LABELS = "labels"
    TRAIN = (
        PublishedBatch("data_batch_1", 31035704, "c99cafc152244af753f735de768cd75f"),
        PublishedBatch("data_batch_2", 31035320, "d4bba439e000b95fd0a9bffe97cbabec"),
        PublishedBatch("data_batch_3", 31035999, "54ebc095f3ab1f0389bbae665268c751"),
        PublishedBatch("data_batch_4", 31035696, "634d18415352ddfa80567beed471001a"),
        PublishedBatch("data_batch_5", 31035623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    )
    TEST = (PublishedBatch("test_batch", 31035526, "40351d587109b95175f43aff81a1287e"),)


class Cifar100(CifarSettings):
    """50,000 + 10,000 colour images 32 x 32 of 100 (fine) classes."""

    NAME = "cifar100"
    CLASSES = 100
    MEAN = (0.5071, 0.4865, 0.4409)
    STD = (0.2673, 0.2564, 0.2762)
    FOLDER = "cifar-100-python"
    ARCHIVE = PublishedFile(
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
    )
    LABELS = "fine_labels"
    TRAIN = (PublishedBatch("train", 155249918, "16019d7e3df5f24257cddd939b257f8d"),)
    TEST = (PublishedBatch("test", 31049918, "f0ef6b0ae62326f3e7ffdfab6717acfc"),)


def _read(folder: Path, name: str) -> tuple[str, bytes]:
    path = folder / name
    if not path.exists():
        raise UserError(f"data file {path} is missing; {REPLACE}.")
    return str(path), read_file(path)


class _Archive:
    """The pickles in the published archive, in memory. It is read to its end, so that gzip checks its checksum."""

    def __init__(self, path: Path, folder: str) -> None:
        self._path, self._folder = path, folder
        content = io.BytesIO(unpacked(read_file(path), path))
        try:
            self._tar = tarfile.open(fileobj=content, mode="r:")  # noqa: SIM115
            self._members = {member.name.removeprefix("./"): member for member in self._tar.getmembers()}
        except Exception as error:  # damaged headers can raise nearly anything
            raise UserError(f"data file {path} is truncated or damaged ({type(error).__name__}); {REPLACE}.") from error

    def read(self, name: str) -> tuple[str, bytes]:
        inside = f"{self._folder}/{name}"
        member = self._members.get(inside)
        # A link may point to itself, and a sparse file may claim any size.
        ordinary = member is not None and member.isreg() and not member.issparse()
        file = self._tar.extractfile(member) if member is not None and ordinary else None
        if file is None:
            raise UserError(f"data file {inside} is missing in {self._path}; {REPLACE}.")
        return f"{self._path}:{inside}", file.read()


def _entries(batch: object, labels: str) -> tuple[object, object]:
    """Return the images and labels of a batch, whose keys are bytes (Python 2) or text; None for what is missing."""
    if not isinstance(batch, dict):
        return None, None
    named = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    return named.get("data"), named.get(labels)


def _are_images(images: object) -> TypeGuard[npt.NDArray[np.uint8]]:
    if not isinstance(images, np.ndarray) or images.ndim != 2 or len(images) == 0:
        return False
    return bool(images.dtype == np.uint8) and images.shape[1] == math.prod(_SHAPE)


def _are_labels(labels: object, count: int, classes: int) -> bool:
    if not isinstance(labels, list) or len(labels) != count:
        return False
    return all(isinstance(label, int) and 0 <= label < classes for label in labels)
