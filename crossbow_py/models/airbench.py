"""The network of airbench94 (K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498).

A 2x2 convolution that whitens patches and is not trained, three groups of two 3x3 convolutions, the largest value of
each channel, and a linear layer. It learns small images in a few epochs.

The whitening convolution has a filter v / √(λ + ε), and its negative, for each eigenvector v of the second moments of
patches of training images, with λ its eigenvalue. `initialise_from` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels

# The first convolution and three halvings leave 2x2 positions for BatchNorm.
MINIMUM_PIXELS = 17
PATCH = 2
EPSILON = 5e-4


class ConvGroup(nn.Module):
    """Two 3x3 convolutions, of which the first halves the image: `[B, in, H, W]` → `[B, out, H/2, W/2]`."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(in_channels, out_channels), _norm(out_channels)
        self.conv2, self.norm2 = _convolution(out_channels, out_channels), _norm(out_channels)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.norm1(self.pool(self.conv1(x))))
        return functional.gelu(self.norm2(self.conv2(x)))


class AirbenchNet(nn.Module):
    """The network: images `[B, in_channels, H, W]` → logits `[B, num_classes]`.

    With `mirrors` they are means over an image and its mirror image in evaluation mode.
    """

    def __init__(self, widths: tuple[int, ...], in_channels: int, num_classes: int, mirrors: bool = False) -> None:
        super().__init__()
        channels = 2 * in_channels * PATCH**2
        self.whiten = nn.Conv2d(in_channels, channels, PATCH, bias=False).requires_grad_(False)
        groups = zip((channels, *widths), widths, strict=False)
        self.groups = nn.Sequential(*(ConvGroup(*each) for each in groups))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.uniform_(self.head.weight, -(3**0.5), 3**0.5)  # standard deviation 1
        self.mirrors = mirrors

    @torch.no_grad()
    def initialise_from(self, images: Tensor) -> None:
        """Set the whitening filters from training images `[N, in_channels, H, W]`, normalised as in training."""
        sums = []
        for few in torch.split(images, 100):  # patches take several times the memory of images
            patches = functional.unfold(few, PATCH)  # [n, values, positions]
            sums.append((patches @ patches.mT).double().sum(0) / patches.shape[2])
        moments = torch.stack(sums).sum(0) / len(images)
        values, vectors = torch.linalg.eigh(moments)
        filters = (vectors / (values + EPSILON).sqrt()).T.reshape(-1, *self.whiten.weight.shape[1:])
        self.whiten.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, x: Tensor) -> Tensor:
        if self.mirrors and not self.training:
            return (self._logits(x) + self._logits(x.flip(-1))) / 2
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        features = self.groups(functional.gelu(self.whiten(x))).amax((2, 3))
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution without a bias whose first filters pass their channel on as it is."""
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight.detach()[:in_channels])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


@dataclass(frozen=True)
class Airbench(ModelSettings):
    """The network of airbench94, 1.97 M parameters in the widths of its author, for images of at least 17x17 pixels."""

    NAME = "airbench"

    widths: tuple[int, ...] = setting((64, 256, 256), "channels of the three groups of convolutions", minimum=1)
    mirrors: bool = setting(False, "in evaluation take the mean of the logits of an image and of its mirror image")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.widths) != 3:
            raise UserError(f"model.widths must be three numbers, got {list(self.widths)}; write them as [64,256,256].")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        return AirbenchNet(self.widths, channels, num_classes, self.mirrors)
