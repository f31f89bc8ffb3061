"""MobileNetV2 for small images (Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018).

A 3x3 convolution to 32 channels, the paper's 17 inverted residual blocks, a 1x1 convolution to 1280 channels, global
average pooling and a linear layer. A block is `y = bn(project(depthwise(expand(x))))`, where the 1x1 expansion and the
3x3 depthwise convolution have BatchNorm and ReLU6, plus x where shapes allow it. For small images the stem and the
second stage keep the resolution, so that the image is halved three times instead of five; no parameter depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels, normalised

# Three halvings leave 2x2 positions, so that BatchNorm has something to average even for a batch of one.
MINIMUM_PIXELS = 16
STEM_CHANNELS, LAST_CHANNELS = 32, 1280
_DIVISOR = 8


class Stage(NamedTuple):
    """A row of the paper's table 2: t, c, n and s."""

    expansion: int
    channels: int
    num_blocks: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 1),  # a stride of 2 in the paper
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """`[B, in, H, W]` → `[B, out, H/stride, W/stride]` through `expansion · in` channels."""

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = expansion * in_channels
        expand = _activated(in_channels, width, 1) if expansion > 1 else []
        self.layers = nn.Sequential(
            *expand, *_activated(width, width, 3, stride, groups=width), *normalised(width, out_channels, 1)
        )
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.has_shortcut else y


class MobileNetV2(nn.Module):
    """The network with `width` times the paper's channels: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, width: float, in_channels: int, num_classes: int) -> None:
        super().__init__()
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = _activated(in_channels, channels, 3)
        for stage in STAGES:
            for block in range(stage.num_blocks):
                into, channels = channels, scaled(stage.channels, width)
                layers.append(InvertedResidual(into, channels, stage.expansion, stage.stride if block == 0 else 1))
        last = scaled(LAST_CHANNELS, max(1.0, width))
        self.features = nn.Sequential(*layers, *_activated(channels, last, 1))
        self.fc = nn.Linear(last, num_classes)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits


def scaled(channels: int, width: float) -> int:
    """Return `channels · width` as the nearest multiple of 8 that is at least 8 and at most a tenth below it."""
    wanted = channels * width
    rounded = max(_DIVISOR, int(wanted + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded if rounded >= 0.9 * wanted else rounded + _DIVISOR


def _activated(in_channels: int, out_channels: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    # In place is safe: batch norm keeps its input for the backward pass, not its output.
    return [*normalised(in_channels, out_channels, size, stride, groups=groups), nn.ReLU6(inplace=True)]


@dataclass(frozen=True)
class MobileNet(ModelSettings):
    """MobileNetV2 for images of 32x32 pixels or so, 2.2 M parameters with 10 classes."""

    NAME = "mobilenet"

    width: float = setting(1.0, "number of channels, as a multiple of the paper's", above=0)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        return MobileNetV2(self.width, channels, num_classes)
