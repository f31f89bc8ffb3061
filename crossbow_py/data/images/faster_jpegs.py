"""JPEG files by simplejpeg, if it is installed: faster than Pillow, and used where it gives the same pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from PIL import ExifTags, Image
from torch import Tensor

_COMPARED = 4  # files of a kind that show a difference, before others of it are decoded by simplejpeg alone
_TRIED = 100  # files of a kind, after which it stays with Pillow if not so many of them could show one
_COLOURED = 8  # levels by which colours of neighbours differ somewhere
_TURNED = range(2, 9)  # orientations other than upright

Kind = tuple[str, ...]


class FasterJpegs:
    """Decodes by simplejpeg what Pillow has opened. The first files of each kind are decoded by both and compared.

    A kind is a colour space and how coarse its colours are sampled; versions of libjpeg differ in how they smooth
    these, which a picture without edges between colours does not show. Pillow alone decodes the kinds that differ or
    are too seldom in colour, what is turned by its EXIF orientation, CMYK, and all in which simplejpeg finds a fault.

    Args:
        decoder: the module simplejpeg.
        plain: returns the pixels of an image that Pillow has opened, uint8 [H, W, 3], or raises.
    """

    def __init__(self, decoder: Any, plain: Callable[[Image.Image], Tensor]) -> None:
        self._decoder, self._plain = decoder, plain
        self._compared, self._equal = Counter[Kind](), Counter[Kind]()  # the latter would have shown a difference
        self._refused: set[Kind] = set()

    def pixels(self, data: bytes, image: Image.Image) -> Tensor:
        """Return the pixels of an encoded image, uint8 [H, W, 3], those of `plain`; raises as that does."""
        kind = self._kind(data, image)
        pixels = None if kind is None or kind in self._refused else self._decoded(data)
        if kind is None or pixels is None:
            return self._plain(image)
        if self._equal[kind] >= _COMPARED:
            return pixels
        expected = self._plain(image)
        self._compared[kind] += 1
        self._equal[kind] += image.mode == "L" or _has_edges_of_colour(expected)
        if not torch.equal(pixels, expected) or self._compared[kind] - self._equal[kind] >= _TRIED:
            self._refused.add(kind)
        return expected

    def _kind(self, data: bytes, image: Image.Image) -> Kind | None:
        """Return the kind of an image; None if Pillow alone is to decode it."""
        if image.format != "JPEG" or image.mode not in ("L", "RGB") or _is_turned(image):
            return None
        try:
            *_, colours, sampling = self._decoder.decode_jpeg_header(data)
        except Exception:  # Pillow says what is wrong, if anything
            return None
        return (image.mode, colours, sampling, "progressive" if "progression" in image.info else "baseline")

    def _decoded(self, data: bytes) -> Tensor | None:
        try:
            return torch.from_numpy(self._decoder.decode_jpeg(data, "RGB"))
        except Exception:  # as above
            return None


def faster_jpegs(plain: Callable[[Image.Image], Tensor]) -> FasterJpegs | None:
    """Return the decoder that falls back on `plain`; None if simplejpeg is not installed, or does not load."""
    try:
        return FasterJpegs(import_module("simplejpeg"), plain)
    except Exception:  # one that was compiled for another NumPy raises ValueError
        return None


def _has_edges_of_colour(pixels: Tensor) -> bool:
    """Return whether colours, not only brightness, change from a row to the next and from a column to the next."""
    red, green, blue = pixels.short().unbind(-1)
    colours = torch.stack([red - green, blue - green])
    return all(colours.diff(dim=axis).abs().amax() >= _COLOURED for axis in (1, 2) if colours.shape[axis] > 1)


def _is_turned(image: Image.Image) -> bool:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in _TURNED
    except Exception:  # damaged EXIF turns nothing
        return False
