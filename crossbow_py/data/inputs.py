"""Inputs that live on the device, addressed by *picks*: int64 [R, B] on the device, whose first row is sample ids.

What an epoch does to every sample is worked out once, as the picks of the whole epoch; a batch is a slice of them. So
the cost per batch is a few gathers, and nothing has to travel from the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from crossbow_py.data.augmentation import Augmentation, Ids, PaddedImages
from crossbow_py.data.normalisation import Normalisation, PixelNormaliser


def is_image_batch(inputs: Tensor) -> bool:
    """uint8 [N, C, H, W] counts as images."""
    return inputs.dtype == torch.uint8 and inputs.ndim == 4


class ResidentInputs(ABC):
    """Read-only after construction; any thread may call it."""

    @abstractmethod
    def epoch_picks(self, seed: int, epoch: int, order: Ids) -> Ids:
        """Picks [R, N] of epoch `epoch` in stream order, on the host. `order` [N] are the sample ids in that order."""

    @abstractmethod
    def plain_picks(self, ids: Ids) -> Ids:
        """Picks [R, B] that give samples `ids` as they are, on the host."""

    @abstractmethod
    def take(self, picks: Tensor) -> Tensor:
        """The inputs [B, ...]; enqueued on the current stream, the host does not wait."""


class RowInputs(ResidentInputs):
    """Whole rows, nothing random: floating inputs (cast and normalised once, here), integers and tokens as they are."""

    def __init__(
        self,
        inputs: Tensor,
        normalisation: Normalisation | None,
        device: torch.device,
        channels_last: bool,
        dtype: torch.dtype,
    ) -> None:
        rows = inputs.to(device)
        if rows.is_floating_point():
            rows = rows.to(dtype) if normalisation is None else normalisation.apply(rows, dtype)
        self._channels_last = channels_last and rows.ndim == 4
        # index_select gives contiguous results, so channels-last rows are stored as [N, H, W, C].
        self._rows = (rows.permute(0, 2, 3, 1) if self._channels_last else rows).contiguous()

    def epoch_picks(self, seed: int, epoch: int, order: Ids) -> Ids:
        """Just the order."""
        return order[np.newaxis]

    def plain_picks(self, ids: Ids) -> Ids:
        """Just the ids."""
        return ids[np.newaxis]

    def take(self, picks: Tensor) -> Tensor:
        """One gather."""
        rows = self._rows.index_select(0, picks[0])
        return rows.permute(0, 3, 1, 2) if self._channels_last else rows


class ImageInputs(ResidentInputs):
    """uint8 images: cropped, flipped, normalised. Picks are (sample id, first pixel of the crop, mirrored)."""

    def __init__(
        self,
        images: Tensor,
        augmentation: Augmentation,
        normalisation: Normalisation,
        device: torch.device,
        channels_last: bool,
        dtype: torch.dtype,
    ) -> None:
        self._augmentation = augmentation
        self._images = PaddedImages(images, augmentation.crop_padding, device)
        channels, height, width = images.shape[1:]
        self._normalise = PixelNormaliser((channels, height, width), normalisation, dtype, device, channels_last)

    def epoch_picks(self, seed: int, epoch: int, order: Ids) -> Ids:
        """Drawn by sample id, then brought into stream order."""
        top, left, mirrored = self._augmentation.draw(seed, epoch, len(order))
        return np.stack([order, self._images.first_pixel(order, top[order], left[order]), mirrored[order]])

    def plain_picks(self, ids: Ids) -> Ids:
        """The crop in the middle, which is the image."""
        top, left, mirrored = self._augmentation.centre(len(ids))
        return np.stack([ids, self._images.first_pixel(ids, top, left), mirrored])

    def take(self, picks: Tensor) -> Tensor:
        """Two gathers (the second one of pixels, or of whole images when nothing is cropped or flipped)."""
        if not self._augmentation.active:
            return self._normalise(self._images.whole(picks[0]))
        return self._normalise(self._images.crops(picks[1], picks[2]))
