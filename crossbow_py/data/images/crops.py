"""Where an image is cropped: at random for training, in the centre for evaluation. Numbers only, no pixels."""

from __future__ import annotations

import math
from typing import NamedTuple

from crossbow_py.data.randomness import sample_block

MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
_LOW, _HIGH = math.log(MIN_RATIO), math.log(MAX_RATIO)
_ATTEMPTS = 10


class Box(NamedTuple):
    """A part of an image, in pixels of that image."""

    left: int
    top: int
    width: int
    height: int


def random_resized_box(seed: int, epoch: int, sample: int, width: int, height: int, min_area: float) -> Box:
    """The part of an image of `width` x `height` that a sample shows in an epoch; it follows from these values alone.

    The rule of "Going deeper with convolutions" (Szegedy et al., 2015) as torchvision's RandomResizedCrop has it: a
    share of the area from [min_area, 1], a ratio of width to height from [3/4, 4/3] with its logarithm uniform, and any
    place; drawn up to ten times until it fits, else the largest part in the centre whose ratio is allowed.
    """
    for attempt in range(_ATTEMPTS):
        words = sample_block(seed, "resized crop", epoch, sample, attempt)
        area, ratio, top, left = ((word >> 11) * 2.0**-53 for word in words)
        pixels = width * height * (min_area + area * (1 - min_area))
        box = _fitted(pixels, math.exp(_LOW + ratio * (_HIGH - _LOW)), top, left, width, height)
        if box is not None:
            return box
    return _largest_in_centre(width, height)


def resized_extent(width: int, height: int, short_side: int) -> tuple[int, int]:
    """(width, height) after the short side became `short_side`; the long one is rounded down, as torchvision does."""
    if width <= height:
        return short_side, max(short_side, short_side * height // width)
    return max(short_side, short_side * width // height), short_side


def centre_box(width: int, height: int, size: int) -> Box:
    """The square of `size` in the centre of an image that is at least as large; halves go to the even pixel."""
    return Box(round((width - size) / 2), round((height - size) / 2), size, size)


def _fitted(pixels: float, ratio: float, top: float, left: float, width: int, height: int) -> Box | None:
    """The box of so many pixels and that ratio, at a place in [0, 1) of what there is; None when it does not fit."""
    box_width, box_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
    if not (0 < box_width <= width and 0 < box_height <= height):
        return None
    return Box(int(left * (width - box_width + 1)), int(top * (height - box_height + 1)), box_width, box_height)


def _largest_in_centre(width: int, height: int) -> Box:
    box_width = min(width, round(height * MAX_RATIO))
    box_height = min(height, round(width / MIN_RATIO))
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)
