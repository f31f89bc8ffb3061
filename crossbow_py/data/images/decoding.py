"""From an image file to pixels of the wanted size: decoded by Pillow, resized by torch's antialiased bilinear filter.

Pixels are uint8 [H, W, 3], red first. Torch's filter gives what Pillow's bilinear filter gives, to a rounding, reads a
part of an image where it lies, and writes straight into its place in a batch.
"""

from __future__ import annotations

import errno
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from crossbow_py.core.errors import one_line
from crossbow_py.data.images.crops import Box, centre_box, resized_extent

FORMATS = ("JPEG", "PNG", "WEBP")
_PAPER = (255, 255, 255)
_LONGEST = 100  # sides to one another: where the short one is enlarged to hundreds of pixels, so is the long one
_WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")

# Files that may well be read another time.
_OF_THE_MACHINE = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE})


class UnreadableImage(Exception):  # noqa: N818 - a state of the file; what it means is decided by who asked
    """An image that cannot be decoded: its path, and the reason in words."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def decode(path: str | Path) -> Tensor:
    """The pixels of a JPEG, PNG or WebP file, turned as its EXIF or XMP orientation says; the first frame of several.

    Grey values become three equal channels (of 16 bits, scaled to 8), palettes and CMYK are converted, and what is
    transparent is laid over white, as pictures with transparent parts are made for light pages.

    Raises:
        OSError, MemoryError: the machine or its file system fails, not the image.
        UnreadableImage: missing, truncated, damaged, in another format, whatever its name says, or a hundred times as
            long as wide.
    """
    try:
        # Pillow's warnings would be a line for every such image and epoch, and what cannot be decoded raises. Filters
        # are the whole process's; worker processes have one thread.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                _check_sides(path, image)
                image.load()
                _turn_upright(image)
                return _rgb(image)
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


def encoded_size(path: str | Path) -> tuple[int, int] | None:
    """(width, height) by the file's header, not turned; None when it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                return image.size
    except Exception:  # as in `decode`
        return None


def crop_resized(pixels: Tensor, box: Box, out: Tensor) -> None:
    """Write the part `box`, resized, into `out`: uint8 [1, 3, H, W], channels last, such as a slot of a batch."""
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
    """With a short side of at most `short_side`: smaller images stay as they are, as enlarging them adds nothing."""
    return pixels if min(pixels.shape[:2]) <= short_side else _resized(pixels, short_side)


def _resized(pixels: Tensor, short_side: int) -> Tensor:
    height, width = pixels.shape[:2]
    new_width, new_height = resized_extent(width, height, short_side)
    if (new_width, new_height) == (width, height):
        return pixels
    resized = torch.empty((new_height, new_width, 3), dtype=torch.uint8)
    crop_resized(pixels, Box(0, 0, width, height), resized.permute(2, 0, 1).unsqueeze(0))
    return resized


def _check_sides(path: str | Path, image: Image.Image) -> None:
    if max(image.size) > _LONGEST * min(image.size):
        width, height = image.size
        raise UnreadableImage(str(path), f"{width} x {height} pixels, more than {_LONGEST} times as long as wide")


def _turn_upright(image: Image.Image) -> None:
    # Damaged EXIF is no damage to the image, and can make its reader raise nearly anything.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _rgb(image: Image.Image) -> Tensor:
    if image.mode in _WIDE_MODES:
        values = np.asarray(image).astype(np.int64)
        grey = (values.clip(0, 65535) + 128) // 257  # 65535 = 255 · 257
        return torch.from_numpy(np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, (*_PAPER, 255))
        image = Image.alpha_composite(paper, image.convert("RGBA"))
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))
