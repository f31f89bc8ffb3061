"""Scanning a folder of images `<part>/<class>/<image>`, sorted, so that a sample is the same file on every machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crossbow_py.core.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_KNOWN = "JPEG, PNG or WebP images (.jpg, .jpeg, .png, .webp)"
_SHOWN_CLASSES = 5


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The image files of one part, in a few flat arrays that worker processes share and that hold millions of names.

    Attributes:
        folder: the part's folder.
        classes: class names, sorted; a label is an index into them.
        labels: int64 [N].
        names: the bytes of all file names.
        ends: int64 [N], the end of each file name in `names`.
    """

    folder: str
    classes: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    names: bytes
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def relative(self, index: int) -> str:
        """Return `class/name` of one file."""
        begin = int(self.ends[index - 1]) if index else 0
        return f"{self.classes[self.labels[index]]}/{os.fsdecode(self.names[begin : int(self.ends[index])])}"

    def path(self, index: int) -> str:
        """Return the path of one file."""
        return f"{self.folder}/{self.relative(index)}"


def scan(root: Path, train: str, val: str) -> tuple[ImageFiles, ImageFiles]:
    """Return the images in `root/train/<class>/` and `root/val/<class>/`. Hidden files and folders are skipped.

    Raises:
        UserError: with the path, for a folder that is missing, cannot be read or holds no class, a class without
            images, an entry that is neither a class nor an image, or a class that is not in both parts.
    """
    parts = scan_part(root / train), scan_part(root / val)
    names = [set(part.classes) for part in parts]
    if names[0] != names[1]:
        both = zip(parts, names, reversed(names), strict=True)
        only = [f"only {part.folder} has {_some(sorted(own - other))}" for part, own, other in both if own - other]
        rule = f"{parts[0].folder} and {parts[1].folder} must hold the same classes"
        raise UserError(f"{rule}, but {' and '.join(only)}; add or remove these folders.")
    return parts


def scan_part(folder: Path) -> ImageFiles:
    """Return the images of one part. Raises UserError as `scan` does."""
    entries = _entries(folder)
    stray = next((entry for entry in entries if not Path(entry).is_dir()), None)
    if stray is not None:
        raise UserError(f"{folder} must hold one folder a class and no files, got {stray.path}; remove it.")
    if not entries:
        raise UserError(f"{folder} must hold one folder a class, with images in it, got an empty folder; fill it.")
    by_class = [_images_of(Path(entry.path)) for entry in entries]
    names = [os.fsencode(name) for images in by_class for name in images]
    return ImageFiles(
        folder=str(folder),
        classes=tuple(entry.name for entry in entries),
        labels=np.repeat(np.arange(len(by_class)), [len(images) for images in by_class]),
        names=b"".join(names),
        ends=np.cumsum([len(name) for name in names]),
    )


def count(folder: Path, most: int) -> tuple[int, int | None]:
    """Return the number of classes and of files of one part; None for more than `most` files, which would take long.

    Raises UserError if the folder cannot be read or has no class.
    """
    classes, images = [entry.path for entry in _entries(folder) if Path(entry).is_dir()], 0
    if not classes:
        raise UserError(f"{folder} must hold one folder a class, with images in it, got none; fill it.")
    for path in classes:
        images += len(_entries(Path(path)))
        if images > most:
            return len(classes), None
    return len(classes), images


def _images_of(folder: Path) -> list[str]:
    """Return the sorted names of a class's images. Raises UserError."""
    entries = _entries(folder)
    for entry in entries:
        # A circle of links is not there, and `is_dir` would raise.
        is_there = not entry.is_symlink() or os.path.exists(entry)  # noqa: PTH110 - as in `downloads.find`
        if is_there and entry.is_dir():
            raise UserError(f"class folder {folder} must hold images and no folders, got {entry.path}; remove it.")
        if is_there and not entry.is_file():
            raise UserError(f"class folder {folder} must hold files, got a device or a pipe: {entry.path}; remove it.")
        if not entry.name.lower().endswith(SUFFIXES):
            raise UserError(f"class folder {folder} must hold {_KNOWN}, got {entry.path}; convert or remove it.")
    if not entries:
        raise UserError(f"class folder {folder} must hold {_KNOWN}, got an empty folder; fill it or remove it.")
    return [entry.name for entry in entries]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden, sorted by name. Raises UserError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"image folder {folder} cannot be read ({reason}); correct data.folder.") from error


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_CLASSES
    return ", ".join(names[:_SHOWN_CLASSES]) + (f" and {more} more" if more > 0 else "")
