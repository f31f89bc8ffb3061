"""Random erasing: a rectangle of a training image is blanked, so that a model cannot rely on any one part of it.

Zhong et al., "Random Erasing Data Augmentation", AAAI 2020, with the ranges of its section on image classification.
The paper draws area, aspect ratio and position again until the rectangle lies within the image. Here the aspect ratio
is drawn among those that fit, uniform in its logarithm, and then the position among those that fit. This takes a fixed
number of draws a sample, and the area is uniform in its range whatever the shape of the image.

Erased pixels are 0 after normalisation: the mean of their channel if images are normalised by it, black if they are
not. So the mean of a model's input stays the same, no random numbers a pixel are needed, and all feeds and kernels
agree to the bit. (The paper fills with noise by default; the mean is its variant RE-M, as in its authors' program.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossbow_py.data.randomness import uniform

# The erased share of the image's area, and the rectangle's height / width.
_AREAS = 0.02, 0.4
_ASPECTS = 0.3, 1 / 0.3

NUM_EDGES = 4

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


def draw_rectangles(
    probability: float, seed: int, epoch: int, num_samples: int, extent: tuple[int, int]
) -> npt.NDArray[np.int64]:
    """Return (top, bottom, left, right) of the erased rectangles, int64 [4, N] by sample id; all 0 for no rectangle.

    Bottom and right are one beyond the last row and column.

    Args:
        probability: probability that a rectangle of a sample is erased.
        seed, epoch: the random numbers depend on these and the sample only.
        num_samples: N.
        extent: (H, W) of the images.
    """
    height, width = extent
    low, high = _AREAS
    areas = (low + (high - low) * uniform(seed, "erased area", epoch, num_samples)) * (height * width)
    least, most = (np.clip(aspect, areas / width**2, height**2 / areas) for aspect in _ASPECTS)
    aspects = least * (most / least) ** uniform(seed, "erased aspect", epoch, num_samples)  # uniform in its logarithm
    tall = np.clip(np.rint(np.sqrt(areas * aspects)), 1, height)
    wide = np.clip(np.rint(areas / tall), 1, width)
    top = np.floor(uniform(seed, "erased top", epoch, num_samples) * (height - tall + 1))
    left = np.floor(uniform(seed, "erased left", epoch, num_samples) * (width - wide + 1))
    erased = uniform(seed, "erased", epoch, num_samples) < probability
    return (np.stack([top, top + tall, left, left + wide]) * erased).astype(np.int64)


class Eraser:
    """Erases rectangles of channels-last images [B, H·W·C] of `shape` (C, H, W). Any thread may call it."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        channels, self._height, width = shape
        # Made on the host, so that the copies are done when this returns: learners' streams may use them unordered.
        self._rows = torch.arange(self._height).to(device)
        # One entry for every value in a row of pixels, so that the mask is laid out in memory as the values are.
        self._columns = torch.arange(width).repeat_interleave(channels).to(device)

    def __call__(self, values: Tensor, rectangles: Tensor) -> None:
        """Set the values in `rectangles`, int64 or int32 [4, B] from `draw_rectangles`, to 0 in place.

        Enqueued on the current stream; shapes do not depend on the rectangles, and the host does not block.
        """
        from_top, from_bottom = self._rows >= rectangles[:2].unsqueeze(-1)
        from_left, from_right = self._columns >= rectangles[2:].unsqueeze(-1)
        # A bitwise and with -1 keeps a value and with 0 clears it. On CPUs masked_fill_ takes twice to four times as
        # long, as it handles one value at a time.
        bits = _BITS[values.element_size()]
        kept_rows, kept_columns = ((each.to(bits) - 1) for each in (from_top ^ from_bottom, from_left ^ from_right))
        rows_of_values = values.view(bits).view(len(values), self._height, len(self._columns))
        rows_of_values.bitwise_and_(kept_rows.unsqueeze(2) | kept_columns.unsqueeze(1))
