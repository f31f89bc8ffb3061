"""Random augmentation of training images. Crop and flip of uint8 images are one gather, on CPU and CUDA.

Images are stored once, zero-padded and channels last, `[N, H + 2p, W + 2p, C]`. A pixel is then a row of a `[·, C]`
table, and cropping and flipping a batch is one `index_select` of H·W rows a sample. The price is memory for the padding
(56 % for 32 x 32 images and p = 4) on the device that holds the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting
from crossbow_py.data.erasing import draw_rectangles
from crossbow_py.data.randomness import uniform

Ids = npt.NDArray[np.int64]
Flip = bool | Literal["alternating"]

# One-line meanings of settings that the sources of images share.
FLIP_HELP = "flip training images left to right: true at random, alternating so that two epochs in a row show both ways"
ERASING_HELP = "probability that a rectangle of a training image is erased; 0 for no erasing"
MIXUP_HELP = "α of MixUp, which trains on weighted means of two samples; 0 for none, 0.2 is usual"
CUTMIX_HELP = "α of CutMix, which pastes a part of one training image into another; 0 for none, 1 is usual"


_MOST_CHANNELS = 4  # RGB and transparency; no image is that narrow


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images. It depends only on the seed, the epoch and the sample.

    How samples are mixed, see `mixing`, depends only on the seed and the batch's position in the stream.
    """

    GROUP: ClassVar[str] = "data"

    crop_padding: int = setting(0, "pixels of zero padding around an image before a random crop of its size", minimum=0)
    flip: Flip = setting(False, FLIP_HELP)
    random_erasing: float = setting(0.0, ERASING_HELP, minimum=0, maximum=1)
    mixup: float = setting(0.0, MIXUP_HELP, minimum=0)
    cutmix: float = setting(0.0, CUTMIX_HELP, minimum=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def active(self) -> bool:
        """Return whether images are augmented one by one."""
        return self.moves_pixels or self.random_erasing > 0

    @property
    def mixes(self) -> bool:
        """Return whether the samples of a batch are mixed, which `Mixing` does."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def shown_mixing(self) -> str:
        """Return the settings of mixing that are not 0, as they are written on the command line."""
        own = {"mixup": self.mixup, "cutmix": self.cutmix}
        return " ".join(f"data.{name}={alpha:g}" for name, alpha in own.items() if alpha)

    @property
    def moves_pixels(self) -> bool:
        """Return whether images are cropped or flipped."""
        return self.crop_padding > 0 or bool(self.flip)

    def __str__(self) -> str:
        """Return the settings of single images as they are written on the command line."""
        flip = str(self.flip).lower()
        return f"data.crop_padding={self.crop_padding} data.flip={flip} data.random_erasing={self.random_erasing:g}"

    def draw(self, seed: int, epoch: int, num_samples: int) -> tuple[Ids, Ids, Ids]:
        """Return (top, left, mirrored), int64 [N] by sample id: the crop's corner in the padded image, and 0 or 1."""
        offsets = 2 * self.crop_padding + 1
        top = (uniform(seed, "crop top", epoch, num_samples) * offsets).astype(np.int64)
        left = (uniform(seed, "crop left", epoch, num_samples) * offsets).astype(np.int64)
        return top, left, self.draw_flips(seed, epoch, num_samples).astype(np.int64)

    def draw_flips(self, seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.bool_]:
        """Return bool [N], whether each sample is mirrored.

        Alternating flips are drawn for the first epoch and then reversed in every other one (K. Jordan, "94% on
        CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498). Random flips would show half of all samples the
        same way as in the epoch before.
        """
        if not self.flip:
            return np.zeros(num_samples, dtype=np.bool_)
        if self.flip == "alternating":
            return (uniform(seed, "flip", 0, num_samples) < 0.5) ^ (epoch % 2 == 1)
        return uniform(seed, "flip", epoch, num_samples) < 0.5

    def draw_erased(self, seed: int, epoch: int, num_samples: int, extent: tuple[int, int]) -> Ids:
        """Return (top, bottom, left, right), int64 [4, N] by sample id, of images of `extent` (H, W); see `erasing`."""
        return draw_rectangles(self.random_erasing, seed, epoch, num_samples, extent)


def flipped(values: Tensor, mirrored: Tensor) -> Tensor:
    """Return images or masks [B, ..., W], flipped left to right where `mirrored` bool [B] is true."""
    return torch.where(mirrored.view(-1, *[1] * (values.ndim - 1)), values.flip(-1), values)


def cropped(images: Tensor, corners: Tensor, padding: int) -> Tensor:
    """Return images uint8 [B, C, H, W] cropped to their size after padding by zeros, in one gather, channels last.

    `corners`, int [2, B], are (top, left) in the padded images, as `Augmentation.draw` gives them.
    """
    height, width = images.shape[2:]
    padded = nn.functional.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    samples, down, across = (torch.arange(count, device=images.device) for count in (len(images), height, width))
    rows, columns = (start.long().unsqueeze(1) + each for start, each in zip(corners, (down, across), strict=True))
    return padded[samples.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def check_shapes(augmentation: Augmentation, image: Sequence[int], target: Sequence[int]) -> None:
    """Raise UserError for targets that cannot follow images [C, H, W] that are moved, or for channels-last images.

    Shapes are without N. A class or a vector of values stays as it is. Targets [..., H, W] are flipped with their
    image. They cannot be cropped: the class beyond the border is unknown.
    """
    if augmentation.active and image[0] > _MOST_CHANNELS >= image[2]:
        wrong = f"are for images [C, H, W], and {list(image)} looks like [H, W, C]"
        raise UserError(f"{augmentation} {wrong}; give images.permute(0, 3, 1, 2).")
    if len(target) < 2 or not augmentation.moves_pixels:
        return
    given = f"{augmentation} move images {list(image)}, and targets {list(target)}"
    if tuple(target[-2:]) != tuple(image[-2:]):
        raise UserError(
            f"{given} may have places in them that would have to move, too; set {Augmentation()} and augment inside "
            "the data set, or give targets [..., H, W] of the images' size, which are flipped with them."
        )
    if augmentation.crop_padding:
        raise UserError(f"{given} have no values beyond the border, which crops would show; set data.crop_padding=0.")


class PaddedImages:
    """uint8 images on a device, stored for cropping. Read-only after construction, so any thread may use it.

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
        down, across = torch.arange(self.height).unsqueeze(1) * self.row, torch.arange(self.width)
        # The offset of every pixel of a crop from its corner, int64 [2, H·W]: as stored, and mirrored.
        self._pattern = torch.stack([(down + each).flatten() for each in (across, across.flip(0))]).to(device)

    def first_pixel(self, ids: Ids, top: Ids, left: Ids) -> Ids:
        """Return the index, int64 [B], of each crop's corner in the pixel table."""
        first: Ids = ids * self._image + top * self.row + left
        return first

    def crops(self, first: Tensor, mirrored: Tensor) -> Tensor:
        """Return uint8 [B, H·W·C], channels last. `first` and `mirrored` (0 or 1) are int64 [B] on the device."""
        index = self._pattern.index_select(0, mirrored).add_(first.unsqueeze(1))
        return self.pixels.index_select(0, index.view(-1)).view(len(first), -1)

    def whole(self, ids: Tensor) -> Tensor:
        """Return uint8 [B, H·W·C] of images stored without padding, one copy each. `ids` is int64 [B] on the device."""
        return self.pixels.view(self.num_samples, -1).index_select(0, ids)
