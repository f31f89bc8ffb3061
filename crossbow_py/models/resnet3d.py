"""3-D residual networks for short clips (Tran et al., A Closer Look at Spatiotemporal Convolutions, CVPR 2018: R3D).

The ResNet of 3x3 blocks with a third axis, time: a 3x7x7 convolution that halves the image and keeps all frames, four
stages with 64, 128, 256 and 512 channels, the last three of which begin by halving frames and image, global average
pooling and a linear layer. Depth 18 has two blocks a stage; depth 10, for machines without a GPU, one.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from crossbow_py.models.base import ModelSettings, input_channels
from crossbow_py.models.resnet_imagenet import Block, ResNet

# Three halvings of the frames and four of the image leave one position.
MINIMUM_FRAMES, MINIMUM_PIXELS = 8, 16


class Block3d(Block):
    """Two 3x3x3 convolutions with BatchNorm: `[B, in, T, H, W]` → `[B, channels, T/stride, H/stride, W/stride]`."""

    NDIM = 3


class ResNet3d(ResNet):
    """Four stages with `num_blocks` blocks: `[B, in_channels, T, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, num_blocks: tuple[int, ...], in_channels: int, num_classes: int) -> None:
        super().__init__(Block3d, num_blocks, in_channels, num_classes)

    def _stem(self, in_channels: int, width: int) -> list[nn.Module]:
        stem = nn.Conv3d(in_channels, width, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        return [stem, nn.BatchNorm3d(width), nn.ReLU(inplace=True)]


class _ResNet3dSettings(ModelSettings):
    """Settings that the depths share."""

    NUM_BLOCKS: ClassVar[tuple[int, ...]]

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS, MINIMUM_FRAMES)
        return ResNet3d(self.NUM_BLOCKS, channels, num_classes)


class ResNet3d10(_ResNet3dSettings):
    """R3D-10, 14.4 M parameters with 10 classes."""

    NAME = "resnet3d10"
    NUM_BLOCKS = (1, 1, 1, 1)


class ResNet3d18(_ResNet3dSettings):
    """R3D-18, 33.4 M parameters with 400 classes."""

    NAME = "resnet3d18"
    NUM_BLOCKS = (2, 2, 2, 2)
