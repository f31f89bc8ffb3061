"""Decoding image files with Pillow or simplejpeg, and resizing with torch's antialiased bilinear filter.

Pixels are uint8 [H, W, 3], red first. Torch's filter equals Pillow's bilinear filter up to rounding. It reads a part of
an image without copying it first, and writes directly into a batch.
"""

from __future__ import annotations

import errno
import functools
import itertools
import warnings
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from crossbow_py.core.errors import one_line
from crossbow_py.data.images.crops import Box, centre_box, resized_extent

FORMATS = ("JPEG", "PNG", "WEBP")
_PAPER = (255, 255, 255)
_LONGEST = 100  # the largest ratio of the sides: enlarging the short side enlarges the long one too
_WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")

# Failures of the machine, after which the file may be readable another time.
_OF_THE_MACHINE = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE})


class UnreadableImage(Exception):  # noqa: N818 - a state of the file; the caller decides whether it is an error
    """An image that cannot be decoded: its path, and the reason in words."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


class FastJpegs:
    """Decodes JPEG files by simplejpeg, which is faster than Pillow, where both give the same pixels.

    How coarsely sampled colours are smoothed depends on the version of libjpeg. So a picture of noise is decoded by
    both in every kind, a colour space and a sampling, and Pillow decodes the kinds that differ.

    Args:
        simplejpeg: the module.
    """

    def __init__(self, simplejpeg: Any) -> None:
        self._simplejpeg = simplejpeg
        noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8))
        options = [*itertools.product(("RGB",), range(3), (False,)), ("L", 0, False), ("RGB", 0, True)]
        same: dict[tuple[str, str], bool] = {}
        for (mode, subsampling, keep_rgb), progressive in itertools.product(options, (False, True)):
            file = BytesIO()
            form = {"subsampling": subsampling, "keep_rgb": keep_rgb, "progressive": progressive}
            noise.convert(mode).save(file, "JPEG", **form)
            with suppress(Exception), Image.open(file) as image:
                kind = self._kind(file.getvalue())
                agrees = torch.equal(self._decoded(file.getvalue()), _rgb(image))
                same[kind] = same.get(kind, True) and agrees
        self._trusted = {kind for kind, agrees in same.items() if agrees}

    def pixels(self, data: bytes, image: Image.Image) -> Tensor | None:
        """Return the pixels of a file that Pillow has opened; None if Pillow is to decode it, or to say what is wrong.

        That is so for images that EXIF turns, too.
        """
        with suppress(Exception):
            if image.format == "JPEG" and image.mode in ("L", "RGB") and self._kind(data) in self._trusted:
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
                return None if turned else self._decoded(data)
        return None

    def _kind(self, data: bytes) -> tuple[str, str]:
        *_, colours, sampling = self._simplejpeg.decode_jpeg_header(data)
        return colours, sampling

    def _decoded(self, data: bytes) -> Tensor:
        return torch.from_numpy(self._simplejpeg.decode_jpeg(data, "RGB"))


@functools.cache
def fast_jpegs() -> FastJpegs | None:
    """Return the fast decoder; None if simplejpeg is not installed, or is compiled for another NumPy."""
    try:
        return FastJpegs(import_module("simplejpeg"))
    except (ImportError, ValueError):
        return None


def decode(path: str | Path, fast: bool = True) -> Tensor:
    """Return the pixels of a JPEG, PNG or WebP file (its first frame), turned by its EXIF or XMP orientation.

    Grey becomes three equal channels (16 bits are scaled to 8), palettes and CMYK are converted, and transparent pixels
    are laid over white, as such pictures are made for light pages.

    Args:
        path: the file's.
        fast: let simplejpeg decode what it can, to the same pixels, if it is installed.

    Raises:
        OSError, MemoryError: the machine or its file system fails, not the image.
        UnreadableImage: the file is missing, truncated, damaged, in another format than these, or more than 100 times
            as long as wide.
    """
    try:
        data = Path(path).read_bytes()
        # Pillow would print a warning for every such image in every epoch; undecodable images raise anyway. Warning
        # filters hold for the whole process, but a worker process has one thread.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                if max(image.size) > _LONGEST * min(image.size):
                    reason = "{} x {} pixels, more than {} times as long as wide".format(*image.size, _LONGEST)
                    raise UnreadableImage(str(path), reason)
                faster = fast_jpegs() if fast else None
                pixels = None if faster is None else faster.pixels(data, image)
                return _pillow_pixels(image) if pixels is None else pixels
    except UnidentifiedImageError as error:
        raise UnreadableImage(str(path), "no JPEG, PNG or WebP image") from error
    except (MemoryError, UnreadableImage):
        raise
    except OSError as error:
        if error.errno in _OF_THE_MACHINE:
            raise
        raise UnreadableImage(str(path), error.strerror or str(error) or type(error).__name__) from error
    except Exception as error:  # a damaged file can make the decoders raise nearly anything
        raise UnreadableImage(str(path), one_line(error)) from error


def _pillow_pixels(image: Image.Image) -> Tensor:
    image.load()
    with suppress(Exception):  # damaged EXIF can raise nearly anything, and does no harm to the image
        ImageOps.exif_transpose(image, in_place=True)
    return _rgb(image)


def in_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return a Pillow image in grey or colour, converted as `decode` does."""
    if image.mode == mode:
        return image
    pixels = _rgb(image).numpy()
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0]) if mode == "L" else pixels)


def channels_first(image: Image.Image) -> Tensor:
    """Return uint8 [C, H, W] of a Pillow image: one channel for grey of 8 bits, else three as of `decode`."""
    if image.mode == "L":
        return torch.from_numpy(np.array(image)).unsqueeze(0)
    return _rgb(image).permute(2, 0, 1)


def encoded_size(path: str | Path) -> tuple[int, int] | None:
    """Return (width, height) from the file's header, before any turning; None if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                return image.size
    except Exception:  # as in `decode`
        return None


def crop_resized(pixels: Tensor, box: Box, out: Tensor) -> None:
    """Resize the part `box` into `out`: uint8 [1, 3, H, W], channels last, such as a slot of a batch."""
    row = pixels.stride(0)
    part = pixels.as_strided(
        (1, 3, box.height, box.width),
        (box.height * row, 1, row, 3),
        pixels.storage_offset() + box.top * row + 3 * box.left,
    )
    torch.ops.aten._upsample_bilinear2d_aa.out(part, out.shape[2:], False, out=out)


def centre_cropped(pixels: Tensor, short_side: int, out: Tensor) -> None:
    """Resize to `short_side` and write the square in the centre into `out`: uint8 [1, 3, S, S], channels last."""
    whole = _resized(pixels, short_side)
    height, width = whole.shape[:2]
    crop_resized(whole, centre_box(width, height, out.shape[-1]), out)  # of its own size, so pixels are copied


def shrunk(pixels: Tensor, short_side: int) -> Tensor:
    """Return the image with a short side of at most `short_side`. Smaller images stay, as enlarging adds nothing."""
    return pixels if min(pixels.shape[:2]) <= short_side else _resized(pixels, short_side)


def _resized(pixels: Tensor, short_side: int) -> Tensor:
    height, width = pixels.shape[:2]
    new_width, new_height = resized_extent(width, height, short_side)
    if (new_width, new_height) == (width, height):
        return pixels
    resized = torch.empty((new_height, new_width, 3), dtype=torch.uint8)
    crop_resized(pixels, Box(0, 0, width, height), resized.permute(2, 0, 1).unsqueeze(0))
    return resized


def _rgb(image: Image.Image) -> Tensor:
    if image.mode in _WIDE_MODES:
        values = np.asarray(image).astype(np.int64)
        grey = (values.clip(0, 65535) + 128) // 257  # 65535 = 255 · 257
        return torch.from_numpy(np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, (*_PAPER, 255))
        image = Image.alpha_composite(paper, image.convert("RGBA"))
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))
