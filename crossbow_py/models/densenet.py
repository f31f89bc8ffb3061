"""Densely connected networks, DenseNet-BC (Huang et al., Densely Connected Convolutional Networks, CVPR 2017).

A stem, then blocks in which every layer takes the outputs of all layers before it in the block: `x ← [x, layer(x)]`.
A layer is BatchNorm, ReLU and a 1x1 convolution to 4k channels, then BatchNorm, ReLU and a 3x3 convolution to k
channels, the growth rate. Between blocks a 1x1 convolution halves the channels and average pooling halves the image.
The network ends in global average pooling and a linear layer. For large images k is 32, the stem is a ResNet's, and
there are four blocks. For small images k is 12, the stem is a 3x3 convolution to 2k channels, and there are three.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from crossbow_py.models.base import ModelSettings, input_channels

# Five halvings leave one position, so a batch of training images this small needs two of them for BatchNorm.
MINIMUM_PIXELS = 32
# Two halvings leave 2x2 positions.
MINIMUM_SMALL_PIXELS = 8
STEM_CHANNELS = 64
GROWTH_RATE = 32
SMALL_GROWTH_RATE = 12
BOTTLENECK = 4  # channels of the 1x1 convolution, in growth rates


class DenseLayer(nn.Module):
    """`[x, layer(x)]`: `[B, in, H, W]` → `[B, in + growth_rate, H, W]`."""

    def __init__(self, in_channels: int, growth_rate: int = GROWTH_RATE) -> None:
        super().__init__()
        width = BOTTLENECK * growth_rate
        self.layer = nn.Sequential(
            *_normalised(in_channels), _convolution(in_channels, width, 1),
            *_normalised(width), _convolution(width, growth_rate, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], dim=1)


class DenseNet(nn.Module):
    """Blocks with `num_layers` layers: `[B, in_channels, H, W]` → logits `[B, num_classes]`.

    `small` chooses the stem and the growth rate for small images.
    """

    def __init__(self, num_layers: tuple[int, ...], in_channels: int, num_classes: int, *, small: bool = False) -> None:
        super().__init__()
        growth_rate = SMALL_GROWTH_RATE if small else GROWTH_RATE
        width = 2 * SMALL_GROWTH_RATE if small else STEM_CHANNELS
        self.stem: nn.Module = _convolution(in_channels, width, 3 if small else 7, stride=1 if small else 2)
        if not small:  # to a quarter of the image's side
            self.stem = nn.Sequential(self.stem, *_normalised(width), nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[nn.Module] = []
        for block, count in enumerate(num_layers):
            if block > 0:
                blocks += [*_normalised(width), _convolution(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            for _ in range(count):
                blocks.append(DenseLayer(width, growth_rate))
                width += growth_rate
        self.blocks = nn.Sequential(*blocks, *_normalised(width))
        self.fc = nn.Linear(width, num_classes)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _normalised(channels: int) -> list[nn.Module]:
    # In place is safe and does not change the block's features: batch norm returns a new tensor, and keeps its input
    # for the backward pass, not its output.
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution without a bias, with He initialisation by the channels in."""
    convolution = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    return convolution


class _DenseNetSettings(ModelSettings):
    """Settings that the depths share."""

    NUM_LAYERS: ClassVar[tuple[int, ...]]
    SMALL: ClassVar[bool] = False

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_SMALL_PIXELS if self.SMALL else MINIMUM_PIXELS)
        return DenseNet(self.NUM_LAYERS, channels, num_classes, small=self.SMALL)


class DenseNet121(_DenseNetSettings):
    """DenseNet-121, 8.0 M parameters with 1000 classes."""

    NAME = "densenet121"
    NUM_LAYERS = (6, 12, 24, 16)


class DenseNet40(_DenseNetSettings):
    """DenseNet-BC of 40 layers with a growth rate of 12, 0.18 M parameters, for images of 32x32 pixels or so."""

    NAME = "densenet40"
    NUM_LAYERS = (6, 6, 6)
    SMALL = True
