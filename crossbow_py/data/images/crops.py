"""Crop boxes of images: random ones for training, the centre for evaluation. Numbers only, no pixels."""

from __future__ import annotations

import math
from typing import NamedTuple

from crossbow_py.data.randomness import sample_block

MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
_LOW, _HIGH = math.log(MIN_RATIO), math.log(MAX_RATIO)
_ATTEMPTS = 10


class Box(NamedTuple):
    """A rectangle in an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_resized_box(seed: int, epoch: int, sample: int, width: int, height: int, min_area: float) -> Box:
    """Return the random crop of a sample's image of `width` x `height` in an epoch, which depends on these values only.

    The rule of "Going deeper with convolutions" (Szegedy et al., 2015) as in torchvision's RandomResizedCrop: a share
    of the area from [min_area, 1], a ratio of width to height from [3/4, 4/3], uniform in its logarithm, and any
    position. It is drawn up to ten times until it fits; else it is the largest rectangle in the centre with an allowed
    ratio.
    """
    for attempt in range(_ATTEMPTS):
        words = sample_block(seed, "resized crop", epoch, sample, attempt)
        area, ratio, top, left = ((word >> 11) * 2.0**-53 for word in words)
        pixels = width * height * (min_area + area * (1 - min_area))
        box = _fitted(pixels, math.exp(_LOW + ratio * (_HIGH - _LOW)), top, left, width, height)
        if box is not None:
            return box
    box_width, box_height = min(width, round(height * MAX_RATIO)), min(height, round(width / MIN_RATIO))
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def resized_extent(width: int, height: int, short_side: int) -> tuple[int, int]:
    """Return (width, height) with a short side of `short_side`; the long one is rounded down, as in torchvision."""
    if width <= height:
        return short_side, max(short_side, short_side * height // width)
    return max(short_side, short_side * width // height), short_side


def centre_box(width: int, height: int, size: int) -> Box:
    """Return the square of `size` in the centre of an image at least as large; halves round to the even pixel."""
    return Box(round((width - size) / 2), round((height - size) / 2), size, size)


def _fitted(pixels: float, ratio: float, top: float, left: float, width: int, height: int) -> Box | None:
    """Return the box of that area and ratio, `top` and `left` in [0, 1) of the free space; None if it does not fit."""
    box_width, box_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
    if not (0 < box_width <= width and 0 < box_height <= height):
        return None
    return Box(int(left * (width - box_width + 1)), int(top * (height - box_height + 1)), box_width, box_height)
