"""Densely connected networks for large images (Huang et al., Densely Connected Convolutional Networks, CVPR 2017).

The stem of a ResNet, then four blocks in which every layer sees what all layers before it in the block have given:
`x ← [x, layer(x)]`, where a layer is BatchNorm, ReLU and a 1x1 convolution to 128 channels, then BatchNorm, ReLU and a
3x3 one to 32 (DenseNet-BC with a growth rate of 32). Between blocks a 1x1 convolution halves the channels, and an
average pooling the image; global average pooling and a linear layer end it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from crossbow_py.models.base import ModelSettings, image_shape

# Five halvings leave one position, so a batch of training images this small needs two of them for BatchNorm.
MINIMUM_PIXELS = 32
STEM_CHANNELS = 64
GROWTH_RATE = 32
BOTTLENECK = 4  # channels of the 1x1 convolution, in growth rates


class DenseLayer(nn.Module):
    """`[x, layer(x)]`: `[B, in, H, W]` → `[B, in + 32, H, W]`."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        width = BOTTLENECK * GROWTH_RATE
        self.layer = nn.Sequential(
            *_normalised(in_channels), _convolution(in_channels, width, 1),
            *_normalised(width), _convolution(width, GROWTH_RATE, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The input and, behind it, what the layer adds."""
        return torch.cat([x, self.layer(x)], dim=1)


class DenseNet(nn.Module):
    """Four blocks with `num_layers` layers: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, num_layers: tuple[int, ...], in_channels: int, num_classes: int) -> None:
        super().__init__()
        width = STEM_CHANNELS
        self.stem = nn.Sequential(
            _convolution(in_channels, width, 7, stride=2),
            *_normalised(width),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        for block, count in enumerate(num_layers):
            if block > 0:
                blocks += [*_normalised(width), _convolution(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            for _ in range(count):
                blocks.append(DenseLayer(width))
                width += GROWTH_RATE
        self.blocks = nn.Sequential(*blocks, *_normalised(width))
        self.fc = nn.Linear(width, num_classes)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        logits: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _normalised(channels: int) -> list[nn.Module]:
    # In place is safe, and leaves the block's features alone: batch norm makes a tensor of its own, and keeps its
    # input for the backward pass, not its output.
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Without a bias; He initialisation by the channels in."""
    convolution = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    return convolution


class _DenseNetSettings(ModelSettings):
    """What the depths share."""

    NUM_LAYERS: ClassVar[tuple[int, ...]]

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Logits `[B, num_classes]` from images `[B, channels, H, W]` of at least 32x32 pixels."""
        channels, _, _ = image_shape(self.NAME, input_shape, MINIMUM_PIXELS)
        return DenseNet(self.NUM_LAYERS, channels, num_classes)


@dataclass(frozen=True)
class DenseNet121(_DenseNetSettings):
    """DenseNet-121, 8.0 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "densenet121"
    NUM_LAYERS: ClassVar[tuple[int, ...]] = (6, 12, 24, 16)
