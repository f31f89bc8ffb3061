"""MixUp and CutMix: a learner's batch is mixed with itself on the device, and so are its targets.

    MixUp    x ← λ·x + (1 − λ)·x'                               Zhang et al., "mixup", ICLR 2018
    CutMix   x ← x, but for a rectangle of a share 1 − λ of x'  Yun et al., "CutMix", ICCV 2019
             y ← λ·y + (1 − λ)·y'                               λ from Beta(α, α), y one-hot

As in torchvision's transforms v2, x' is the batch rolled by one sample (a batch is in random order anyway), one λ holds
for a batch, and CutMix's λ is then the share that the rectangle, cut off at the border, leaves of x. With both, a batch
has the one or the other with equal probability. All draws follow from the seed and the batch's position in the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import form_of
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import has_integers
from crossbow_py.data.feed import Batch
from crossbow_py.data.randomness import sample_block

_LARGEST_EXPONENT = 700.0  # whose exponential is a float64
_WITH_NEXT = ((slice(1, None), slice(None, -1)), (slice(None, 1), slice(-1, None)))  # places of x, and of x' for them


class Mix(NamedTuple):
    """The mixture of a batch: λ, and CutMix's rectangle (top, bottom, left, right); None for MixUp."""

    share: float
    box: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Mixing:
    """Mixes batches of floating inputs [B, ...] and classes [B]. Any thread may call it.

    Attributes:
        mixup, cutmix: α of each; 0 for none of it.
        seed: seed of the draws.
        num_classes: C, the width of the model's output.
    """

    mixup: float
    cutmix: float
    seed: int
    num_classes: int

    def draw(self, start: int, extent: tuple[int, int]) -> Mix:
        """Return the mixture of the batch at stream position `start`, of images of `extent` (H, W)."""
        *words, place = sample_block(self.seed, "mix", 0, start, 0)
        chosen, first, second = ((word >> 11) * 2.0**-53 for word in words)
        cuts = self.cutmix > 0 and (self.mixup == 0 or chosen < 0.5)
        share = symmetric_beta(self.cutmix if cuts else self.mixup, first, second)
        if not cuts:
            return Mix(share, None)
        height, width = extent
        y, x = (int(part * 2.0**-32 * side) for part, side in zip(divmod(place, 2**32), extent, strict=True))
        reach = 0.5 * math.sqrt(1.0 - share)
        tall, wide = int(reach * height), int(reach * width)
        top, bottom = max(y - tall, 0), min(y + tall, height)
        left, right = max(x - wide, 0), min(x + wide, width)
        return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))

    def __call__(self, batch: Batch, start: int) -> Batch:
        """Return the mixed batch: inputs as they were given, and shares of the classes, floating [B, C].

        Enqueued on the current stream; the host does not block.
        """
        inputs: Tensor = batch.inputs
        extent = (inputs.shape[-2], inputs.shape[-1]) if self.cutmix else (1, 1)
        share, box = self.draw(start, extent)
        if box is None:
            mixed = inputs * share
            for own, others in _WITH_NEXT:
                mixed[own].add_(inputs[others], alpha=1.0 - share)
        else:
            rows, columns = slice(*box[:2]), slice(*box[2:])
            mixed = inputs.clone()
            for own, others in _WITH_NEXT:
                mixed[own][..., rows, columns] = inputs[others][..., rows, columns]
        hot = nn.functional.one_hot(batch.targets.long(), self.num_classes)
        hot = hot.to(torch.float64 if inputs.dtype == torch.float64 else torch.float32)
        return Batch(mixed, hot.mul(share).add_(hot.roll(1, 0), alpha=1.0 - share))


def symmetric_beta(alpha: float, first: float, second: float) -> float:
    """Return a draw of Beta(α, α) made of two uniform ones in [0, 1).

        (1 + cos(2πv)·√(s / (1 + s·cos²(2πv)))) / 2    with s = u^(−1/α) − 1

    By Bailey's polar method for Student's t with 2α degrees of freedom ("Polar generation of random variates with the
    t-distribution", Mathematics of Computation 62, 1994), of which (1 + t / √(2α + t²)) / 2 is Beta(α, α).
    """
    exponent = min(-math.log1p(-first) / alpha, _LARGEST_EXPONENT)  # 1 − first is uniform in (0, 1]
    cosine = math.cos(2 * math.pi * second)
    squared = math.expm1(exponent) * cosine * cosine  # t² / 2α
    if squared == 0:
        return 0.5
    return 0.5 * (1.0 + math.copysign(1.0 / math.sqrt(1.0 + 1.0 / squared), cosine))


def check_mixable(augmentation: Augmentation, batch: Batch, batch_size: int) -> None:
    """Raise UserError for a small batch, as it comes from a feed, of inputs and targets that cannot be mixed."""
    inputs, targets = batch
    asked = augmentation.shown_mixing
    remedy = "set data.mixup=0 data.cutmix=0"
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise UserError(
            f"{asked} is for one input of images or floating values, and a sample has {form_of(inputs)}; {remedy}."
        )
    if targets.ndim != 1 or not has_integers(targets):
        raise UserError(f"{asked} is for one class a sample, and a target is {form_of(targets)}; {remedy}.")
    if augmentation.cutmix and inputs.ndim < 4:
        raise UserError(
            f"data.cutmix={augmentation.cutmix:g} is for images [C, H, W], and a sample has {form_of(inputs)}; set "
            "data.cutmix=0, and data.mixup=0.2 for example."
        )
    if batch_size < 2:
        raise UserError(f"{asked} mixes the samples of a learner's batch, got batch_size=1; set batch_size=2 or more.")
