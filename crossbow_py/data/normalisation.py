"""Normalisation of inputs by a mean and a standard deviation per channel, for pixels in one fused pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree, leaves
from crossbow_py.data.erasing import Eraser

_VALUES_AT_ONCE = 2**22  # checked at a time, so that temporary copies are small
_MOST_BLUR = 0.02  # of a column's standard deviation: rounding that adds no more noise than that is let be


@dataclass(frozen=True)
class Normalisation:
    """The normalisation (x − mean) / std, where uint8 inputs count as x / 255; one value per channel or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not self.mean or len(self.mean) != len(self.std) or not finite or min(self.std) <= 0:
            rule = f"mean and std must be finite, of equal length, and std positive, got {self.mean} and {self.std}"
            raise UserError(f"{rule}; give one value a channel, and 1 as the std of one that does not vary.")

    @classmethod
    def of(cls, mean: Sequence[float] | float | None, std: Sequence[float] | float | None) -> Normalisation | None:
        """Build from a mean and a std, of which a number holds for all channels; None if both are None.

        Raises UserError if only one is given.
        """
        if mean is None and std is None:
            return None
        if mean is None or std is None:
            raise UserError(f"mean and std must be given together, got mean={mean} and std={std}; give both or none.")
        return cls(*((each,) if isinstance(each, int | float) else tuple(each) for each in (mean, std)))

    def check_channels(self, channels: int) -> None:
        """Raise UserError unless there is one value per channel or one for all."""
        if len(self.mean) not in (1, channels):
            found = f"got {len(self.mean)} for {channels} channels"
            raise UserError(f"mean and std must have one value a channel, {found}; give as many, or one for all.")

    def apply(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise `inputs` [B, C, ...], uint8 or floating, in float32 at least. Return `dtype`."""
        self.check_channels(inputs.shape[1])
        mean, std = self.constants(inputs, dtype)
        return inputs.to(mean.dtype).sub(mean).div_(std).to(dtype)

    def constants(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (mean, std) in units of `inputs` [B, C, ...], to broadcast with them, in the dtype to compute in."""
        unit = 255.0 if inputs.dtype == torch.uint8 else 1.0
        axes = (-1, *(1,) * (inputs.ndim - 2))
        values = (torch.tensor(each, dtype=torch.float64).mul_(unit).view(axes) for each in (self.mean, self.std))
        mean, std = (each.to(inputs.device, compute_dtype(dtype)) for each in values)
        return mean, std


IDENTITY = Normalisation((0.0,), (1.0,))


class BatchFormat(NamedTuple):
    """The form of a feed's inputs.

    Attributes:
        device: where batches are.
        dtype: dtype of floating inputs.
        channels_last: whether 4-D inputs are channels last in memory.
        normalisation: None leaves inputs as they are, but for uint8 images and clips, which are scaled to [0, 1].
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    normalisation: Normalisation | None = None

    def of_several(self, inputs: Tensor) -> BatchFormat:
        """Return the form of one of several inputs: of bytes as it is, and others are not normalised."""
        return self if inputs.dtype == torch.uint8 else self._replace(normalisation=None)


class PixelNormaliser:
    """Normalises channels-last uint8 pixels [B, H·W·C] by one fused multiply-add. Any thread may call it.

    `shape` is (C, H, W). The constants take 8·C·H·W bytes (16·C·H·W in float64) on the device.
    """

    def __init__(self, shape: tuple[int, int, int], form: BatchFormat) -> None:
        normalisation = form.normalisation or IDENTITY
        normalisation.check_channels(shape[0])
        self._shape, self._dtype, self._channels_last = shape, form.dtype, form.channels_last
        self._compute = compute_dtype(form.dtype)
        mean, std = np.asarray(normalisation.mean), np.asarray(normalisation.std)
        self._scale, self._shift = (self._row(values).to(form.device) for values in (1 / (255 * std), -mean / std))
        self._erase = Eraser(shape, form.device)

    def __call__(self, pixels: Tensor, erased: Tensor | None = None) -> Tensor:
        """Return images [B, C, H, W], channels last in memory or contiguous.

        `erased`, int [4, B] on the device, are rectangles that `Eraser` sets to 0; None for none.
        """
        channels, height, width = self._shape
        values = torch.addcmul(self._shift, pixels.to(self._compute), self._scale).to(self._dtype)
        if erased is not None:
            self._erase(values, erased)
        images = values.view(-1, height, width, channels).permute(0, 3, 1, 2)
        return images if self._channels_last else images.contiguous()

    def table(self) -> Tensor:
        """Return [256, C]: the normalised value of every pixel value in each channel, to the bit."""
        channels = self._shape[0]
        values = torch.arange(256, device=self._scale.device).to(self._compute).unsqueeze(1)
        return torch.addcmul(self._shift[:channels], values, self._scale[:channels]).to(self._dtype)

    def _row(self, per_channel: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Tensor:
        """Return [H·W·C], the constants repeated for every pixel: broadcasting an axis of length C = 3 defeats SIMD."""
        channels, height, width = self._shape
        row = np.broadcast_to(per_channel, (height * width, channels)).reshape(-1)
        return torch.from_numpy(np.array(row)).to(self._compute)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32: bfloat16 has fewer bits than a pixel."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rounded(NamedTuple):
    """An integer among floating inputs, and the number that the dtype of batches makes of it."""

    value: float
    becomes: float

    def remark(self, dtype: torch.dtype) -> str:
        """Return the remark for the user, as a part of a sentence."""
        kind = str(dtype).removeprefix("torch.")
        remedy = "set precision=fp32, or " if dtype == torch.bfloat16 else ""
        return (
            f"the inputs have whole numbers that {kind} rounds: {self.value:.0f} becomes {self.becomes:.0f}; if they "
            f"are ids, years or counts, {remedy}give them as a tensor of integers"
        )


class Blurred(NamedTuple):
    """A column whose values lie so close together that a dtype rounds much of their differences away.

    `share` is the root-mean-square error of rounding over the column's standard deviation.
    """

    what: str
    column: int
    mean: float
    share: float

    def remark(self, dtype: torch.dtype) -> str:
        """Return the remark for the user, as a part of a sentence."""
        kind = str(dtype).removeprefix("torch.")
        return (
            f"column {self.column} of the {self.what} (mean {self.mean:.4g}) is off by {self.share:.0%} of its "
            f"standard deviation when it is rounded to {kind}; subtract the mean and divide by the deviation, or set "
            "precision=fp32"
        )


Loses = Rounded | Blurred


def rounding_note(found: Loses, dtype: torch.dtype) -> str:
    """Return a remark on what a dtype loses as a sentence."""
    return f"{found.remark(dtype).capitalize()}."


def digits_lost(inputs: Tree, targets: Tensor, dtype: torch.dtype) -> Loses | None:
    """Return what batches in a floating dtype lose of inputs and targets, of [N, ...] each; None if only noise."""
    for each in leaves(inputs):
        if (found := _rounded_in(each, dtype) or _blurred_in(each, dtype, "inputs")) is not None:
            return found
    return _blurred_in(targets, dtype, "targets")


def _blurred_in(values: Tensor, dtype: torch.dtype, what: str) -> Blurred | None:
    """Return the column, along the last dimension and of images along the second, that rounding blurs the most."""
    if not values.is_floating_point() or torch.finfo(values.dtype).eps >= torch.finfo(dtype).eps or len(values) < 2:
        return None
    few = values[: max(2, _VALUES_AT_ONCE * len(values) // max(1, values.numel()))].detach().double()
    columns = few.movedim(1, -1) if few.ndim > 3 else few if few.ndim > 1 else few.unsqueeze(1)
    columns = columns.flatten(0, -2)
    mean, deviation = columns.mean(0), columns.std(0)
    error = (columns.to(values.dtype).to(dtype).double() - columns).square().mean(0).sqrt()
    share = torch.where(deviation > 0, error / deviation, 0.0).nan_to_num(0.0, 0.0)
    worst = int(share.argmax()) if share.numel() else 0
    if not share.numel() or share[worst] <= _MOST_BLUR:
        return None
    return Blurred(what, worst, float(mean[worst]), float(share[worst]))


def not_finite(inputs: Tree) -> int | None:
    """Return the first sample of floating inputs [N, ...] that holds NaN or an infinity, None if none does."""
    for each in leaves(inputs):
        if not each.is_floating_point() or not each.numel() or bool(each.sum(dtype=torch.float64).isfinite()):
            continue
        bad = (~each.isfinite()).flatten(1).any(1) if each.ndim > 1 else ~each.isfinite()
        if bad.any():
            return int(bad.int().argmax())
    return None


def rounded_integer(inputs: Tree, dtype: torch.dtype) -> Rounded | None:
    """Return the first integer in floating inputs [N, ...] that `dtype` rounds, None if there is none.

    It may be an id, which must not become its neighbour's. Rounding other numbers only loses noise.
    """
    return next(filter(None, (_rounded_in(each, dtype) for each in leaves(inputs))), None)


def _rounded_in(inputs: Tensor, dtype: torch.dtype) -> Rounded | None:
    if not inputs.is_floating_point() or torch.finfo(inputs.dtype).eps >= torch.finfo(dtype).eps:
        return None
    exact = 2 / torch.finfo(dtype).eps  # every integer up to there is exact
    for part in torch.split(inputs, max(1, _VALUES_AT_ONCE * len(inputs) // max(1, inputs.numel()))):
        if part.numel() and bool((part.abs() > exact).any()):
            rounded = part.to(dtype).to(part.dtype)
            found = (rounded != part) & (part == part.round()) & part.isfinite()
            if found.any():
                return Rounded(float(part[found][0]), float(rounded[found][0]))
    return None
