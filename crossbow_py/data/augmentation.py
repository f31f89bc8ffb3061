"""What is done to training images at random; crop and flip of uint8 images by one gather, alike on CPU and CUDA.

Images are stored once, zero-padded and channels last, `[N, H + 2p, W + 2p, C]`; a pixel is then a row of a `[·, C]`
table, and cropping and flipping a batch is one `index_select` of H·W rows a sample. The cost is the padding's memory
(56 % for 32 x 32 images and p = 4), on the device that holds the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting
from crossbow_py.data.erasing import draw_rectangles
from crossbow_py.data.randomness import uniform

Ids = npt.NDArray[np.int64]
Flip = bool | Literal["alternating"]

# The one-line meanings of settings that every source of images has too.
FLIP_HELP = "flip training images left to right: true at random, alternating so that two epochs in a row show both ways"
ERASING_HELP = "probability that a rectangle of a training image is erased; 0 for no erasing"


_MOST_CHANNELS = 4  # RGB and transparency; images are not so narrow


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images at random. The same sample in the same epoch is always augmented alike."""

    GROUP: ClassVar[str] = "data"

    crop_padding: int = setting(0, "pixels of zero padding around an image before a random crop of its size", minimum=0)
    flip: Flip = setting(False, FLIP_HELP)
    random_erasing: float = setting(0.0, ERASING_HELP, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def active(self) -> bool:
        """Whether anything is done at all."""
        return self.moves_pixels or self.random_erasing > 0

    @property
    def moves_pixels(self) -> bool:
        """Whether images are cropped or flipped."""
        return self.crop_padding > 0 or bool(self.flip)

    def __str__(self) -> str:
        """As the user sets it."""
        flip = str(self.flip).lower()
        return f"data.crop_padding={self.crop_padding} data.flip={flip} data.random_erasing={self.random_erasing:g}"

    def draw(self, seed: int, epoch: int, num_samples: int) -> tuple[Ids, Ids, Ids]:
        """(top, left, flip), each [N] by sample id: the crop's corner in the padded image, and 0 or 1 for mirrored."""
        offsets = 2 * self.crop_padding + 1
        top = (uniform(seed, "crop top", epoch, num_samples) * offsets).astype(np.int64)
        left = (uniform(seed, "crop left", epoch, num_samples) * offsets).astype(np.int64)
        return top, left, self.draw_flips(seed, epoch, num_samples).astype(np.int64)

    def draw_flips(self, seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.bool_]:
        """Whether each sample [N] is mirrored.

        Alternating: as drawn for the first epoch, and from then on the other way round in every other one (K. Jordan,
        "94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498). Flips at random show half of all samples
        the same way as in the epoch before.
        """
        if not self.flip:
            return np.zeros(num_samples, dtype=np.bool_)
        if self.flip == "alternating":
            return (uniform(seed, "flip", 0, num_samples) < 0.5) ^ (epoch % 2 == 1)
        return uniform(seed, "flip", epoch, num_samples) < 0.5

    def draw_erased(self, seed: int, epoch: int, num_samples: int, extent: tuple[int, int]) -> Ids:
        """(top, bottom, left, right) [4, N] by sample id, of images of (H, W) as they are shown; see `erasing`."""
        return draw_rectangles(self.random_erasing, seed, epoch, num_samples, extent)

    def centre(self, num_samples: int) -> tuple[Ids, Ids, Ids]:
        """(top, left, flip) that give the images as they are."""
        corner = np.full(num_samples, self.crop_padding, dtype=np.int64)
        return corner, corner, np.zeros(num_samples, dtype=np.int64)


def flipped(values: Tensor, mirrored: Tensor) -> Tensor:
    """Images, or masks of them, [B, ..., W] left to right where `mirrored` bool [B] says so."""
    return torch.where(mirrored.view(-1, *[1] * (values.ndim - 1)), values.flip(-1), values)


def check_shapes(augmentation: Augmentation, image: Sequence[int], target: Sequence[int]) -> None:
    """Raise UserError for targets of a shape (without N) that would not go with images [C, H, W] that are moved.

    So it does for images whose channels are last.

    A class, or a vector of values, stays what it is. Targets [..., H, W] are flipped with their image. They are not
    cropped: nobody knows which class lies beyond the border.
    """
    if augmentation.active and image[0] > _MOST_CHANNELS >= image[2]:
        raise UserError(
            f"{augmentation} are for images [C, H, W], and {list(image)} looks like [H, W, C]; give "
            "images.permute(0, 3, 1, 2)."
        )
    if len(target) < 2 or not augmentation.moves_pixels:
        return
    given = f"{augmentation} move images {list(image)}, and targets {list(target)}"
    if tuple(target[-2:]) != tuple(image[-2:]):
        raise UserError(
            f"{given} may have places in them that would have to move, too; set {Augmentation()} and augment inside "
            "the data set, or give targets [..., H, W] of the images' size, which are flipped with them."
        )
    if augmentation.crop_padding:
        raise UserError(
            f"{given} have no values beyond the border, which crops would show; set data.crop_padding=0, or crop "
            "inside the data set."
        )


class PaddedImages:
    """uint8 images on a device, stored for cropping. Read-only after construction, so any thread may call it.

    Attributes:
        pixels: uint8 [N·(H + 2p)·(W + 2p), C], the pixel table.
        row: pixels in a row of a padded image, W + 2p.
        extent: (H, W).
    """

    def __init__(self, images: Tensor, padding: int, device: torch.device) -> None:
        """Copy `images` uint8 [N, C, H, W] to `device`, padded with `padding` zero pixels on every side."""
        self.num_samples, self.channels, self.height, self.width = images.shape
        self.extent = self.height, self.width
        self.row = self.width + 2 * padding
        self._image = (self.height + 2 * padding) * self.row
        padded = torch.zeros(self.num_samples, self._image, self.channels, dtype=torch.uint8, device=device)
        rows = padded.view(self.num_samples, -1, self.row, self.channels)
        rows[:, padding : padding + self.height, padding : padding + self.width].copy_(images.permute(0, 2, 3, 1))
        self.pixels = padded.view(-1, self.channels)
        self._pattern = self._patterns().to(device)

    def first_pixel(self, ids: Ids, top: Ids, left: Ids) -> Ids:
        """Index [B] in the pixel table of the corner of each crop."""
        first: Ids = ids * self._image + top * self.row + left
        return first

    def crops(self, first: Tensor, mirrored: Tensor) -> Tensor:
        """uint8 [B, H·W·C], channels last. `first` and `mirrored` (0 or 1) are int64 [B] on the device."""
        index = self._pattern.index_select(0, mirrored).add_(first.unsqueeze(1))
        return self.pixels.index_select(0, index.view(-1)).view(len(first), -1)

    def whole(self, ids: Tensor) -> Tensor:
        """uint8 [B, H·W·C] of images stored without padding: one copy an image. `ids` is int64 [B] on the device."""
        return self.pixels.view(self.num_samples, -1).index_select(0, ids)

    def _patterns(self) -> Tensor:
        """int64 [2, H·W]: distance of every pixel of a crop from its corner, as it is and mirrored."""
        down = torch.arange(self.height).unsqueeze(1) * self.row
        across = torch.arange(self.width)
        return torch.stack([(down + across).flatten(), (down + across.flip(0)).flatten()])
