"""Random crop and horizontal flip of uint8 images by one gather, alike on CPU and CUDA.

Images are stored once, zero-padded and channels last, `[N, H + 2p, W + 2p, C]`; a pixel is then a row of a `[·, C]`
table, and cropping and flipping a batch is one `index_select` of H·W rows a sample. The cost is the padding's memory
(56 % for 32 x 32 images and p = 4), on the device that holds the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossbow_py.data.randomness import uniform
from crossbow_py.settings import check, setting

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images at random. The same sample in the same epoch is always augmented alike."""

    GROUP: ClassVar[str] = "data"

    crop_padding: int = setting(0, "pixels of zero padding around an image before a random crop of its size", minimum=0)
    flip: bool = setting(False, "flip images left to right at random")

    def __post_init__(self) -> None:
        check(self)

    @property
    def active(self) -> bool:
        """Whether anything is done at all."""
        return self.crop_padding > 0 or self.flip

    def draw(self, seed: int, epoch: int, num_samples: int) -> tuple[Ids, Ids, Ids]:
        """(top, left, flip), each [N] by sample id: the crop's corner in the padded image, and 0 or 1 for mirrored."""
        offsets = 2 * self.crop_padding + 1
        top = (uniform(seed, "crop top", epoch, num_samples) * offsets).astype(np.int64)
        left = (uniform(seed, "crop left", epoch, num_samples) * offsets).astype(np.int64)
        mirrored = uniform(seed, "flip", epoch, num_samples) < 0.5 * self.flip
        return top, left, mirrored.astype(np.int64)

    def centre(self, num_samples: int) -> tuple[Ids, Ids, Ids]:
        """(top, left, flip) that give the images as they are."""
        corner = np.full(num_samples, self.crop_padding, dtype=np.int64)
        return corner, corner, np.zeros(num_samples, dtype=np.int64)


class PaddedImages:
    """uint8 images on a device, stored for cropping. Read-only after construction, so any thread may call it.

    Attributes:
        pixels: uint8 [N·(H + 2p)·(W + 2p), C], the pixel table.
        row: pixels in a row of a padded image, W + 2p.
    """

    def __init__(self, images: Tensor, padding: int, device: torch.device) -> None:
        """Copy `images` uint8 [N, C, H, W] to `device`, padded with `padding` zero pixels on every side."""
        self.num_samples, self.channels, self.height, self.width = images.shape
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
