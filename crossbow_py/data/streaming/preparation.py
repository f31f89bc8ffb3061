"""From a batch as workers hand it over to what a model takes: flipped, normalised, cast and erased, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from crossbow_py.data.augmentation import flipped
from crossbow_py.data.normalisation import IDENTITY, Normalisation, PixelNormaliser
from crossbow_py.data.resident.inputs import is_clip_batch, is_image_batch


class Preparation:
    """What is done to streamed inputs on the device. Any thread may call it.

    uint8 images [B, C, H, W] and clips [B, C, T, H, W] are scaled to [0, 1] and normalised; floating inputs are cast,
    and normalised when there is a normalisation; other inputs stay as they are.
    """

    def __init__(
        self, normalisation: Normalisation | None, device: torch.device, channels_last: bool, dtype: torch.dtype
    ) -> None:
        self._normalisation, self._device = normalisation, device
        self._channels_last, self._dtype = channels_last, dtype
        self._constants: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._pixels: dict[tuple[int, int, int], PixelNormaliser] = {}

    def __call__(self, inputs: Tensor, mirrored: Tensor | None = None, erased: Tensor | None = None) -> Tensor:
        """[B, ...] prepared, enqueued on the current stream; the host does not wait.

        Args:
            inputs: on the device.
            mirrored: bool [B] on the device, which images to flip left to right; None for none.
            erased: int32 [4, B] on the device, (top, bottom, left, right) of what is erased of images; None for none.
        """
        if is_image_batch(inputs):
            return self._images(inputs, mirrored, erased)
        if is_clip_batch(inputs):
            return self._normalised(inputs, self._normalisation or IDENTITY)
        if inputs.is_floating_point():
            normalisation = self._normalisation
            inputs = inputs.to(self._dtype) if normalisation is None else self._normalised(inputs, normalisation)
        last = self._channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if last else inputs

    @property
    def casts_to(self) -> torch.dtype | None:
        """What floating inputs are cast to as they are; None where they are normalised."""
        return None if self._normalisation else self._dtype

    def _normalised(self, inputs: Tensor, normalisation: Normalisation) -> Tensor:
        """As `Normalisation.apply`, its constants copied to the device once."""
        kind = inputs.ndim, inputs.dtype
        if kind not in self._constants:
            normalisation.check_channels(inputs.shape[1])
            self._constants[kind] = normalisation.constants(inputs, self._dtype)
        mean, std = self._constants[kind]
        return inputs.to(mean.dtype).sub(mean).div_(std).to(self._dtype)

    def _images(self, images: Tensor, mirrored: Tensor | None, erased: Tensor | None) -> Tensor:
        if mirrored is not None:
            images = flipped(images, mirrored)
        channels, height, width = shape = images.shape[1], images.shape[2], images.shape[3]
        if shape not in self._pixels:
            normalisation = self._normalisation or IDENTITY
            self._pixels[shape] = PixelNormaliser(
                (channels, height, width), normalisation, self._dtype, self._device, self._channels_last
            )
        return self._pixels[shape](images.permute(0, 2, 3, 1).reshape(len(images), -1), erased)
