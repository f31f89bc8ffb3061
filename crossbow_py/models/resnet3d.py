"""3-D residual networks for short clips (Tran et al., A Closer Look at Spatiotemporal Convolutions, CVPR 2018: R3D).

The ResNet of 3x3 blocks with a third axis, time: a 3x7x7 convolution that halves the image and keeps all frames, four
stages with 64, 128, 256 and 512 channels, the last three of which begin by halving frames and image, global average
pooling and a linear layer. Depth 18 has two blocks a stage; depth 10, for machines without a GPU, one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from crossbow_py.models.base import ModelSettings, clip_shape
from crossbow_py.models.resnet_imagenet import STAGE_CHANNELS, Residual

# Three halvings of the frames and four of the image leave one position.
MINIMUM_FRAMES, MINIMUM_PIXELS = 8, 16


class Block3d(Residual):
    """Two 3x3x3 convolutions with BatchNorm: `[B, in, T, H, W]` → `[B, channels, T/stride, H/stride, W/stride]`."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        branch = nn.Sequential(
            _convolution(in_channels, channels, 3, stride),
            nn.BatchNorm3d(channels),
            nn.ReLU(inplace=True),
            _convolution(channels, channels, 3),
            nn.BatchNorm3d(channels),
        )
        super().__init__(branch, _shortcut(in_channels, channels, stride))


class ResNet3d(nn.Module):
    """Four stages with `num_blocks` blocks: `[B, in_channels, T, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, num_blocks: tuple[int, ...], in_channels: int, num_classes: int) -> None:
        super().__init__()
        width = STAGE_CHANNELS[0]
        stem = nn.Conv3d(in_channels, width, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
        self.stem = nn.Sequential(_initialised(stem), nn.BatchNorm3d(width), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        for stage, (channels, count) in enumerate(zip(STAGE_CHANNELS, num_blocks, strict=True)):
            for number in range(count):
                blocks.append(Block3d(width, channels, stride=2 if stage > 0 and number == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `[B, num_classes]` of a batch of clips."""
        logits: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3, 4)))
        return logits


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_convolution(in_channels, out_channels, 1, stride), nn.BatchNorm3d(out_channels))


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv3d:
    """Build a convolution without a bias, which BatchNorm would remove."""
    return _initialised(nn.Conv3d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False))


def _initialised(convolution: nn.Conv3d) -> nn.Conv3d:
    """Apply He initialisation by the channels out."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


class _ResNet3dSettings(ModelSettings):
    """Settings that the depths share."""

    NUM_BLOCKS: ClassVar[tuple[int, ...]]

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a module of logits `[B, num_classes]` from clips of at least 8 frames of 16x16 pixels."""
        channels, _, _, _ = clip_shape(self.NAME, input_shape, MINIMUM_FRAMES, MINIMUM_PIXELS)
        return ResNet3d(self.NUM_BLOCKS, channels, num_classes)


@dataclass(frozen=True)
class ResNet3d10(_ResNet3dSettings):
    """R3D-10, 14.4 M parameters with 10 classes."""

    NAME: ClassVar[str] = "resnet3d10"
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (1, 1, 1, 1)


@dataclass(frozen=True)
class ResNet3d18(_ResNet3dSettings):
    """R3D-18, 33.4 M parameters with 400 classes."""

    NAME: ClassVar[str] = "resnet3d18"
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
