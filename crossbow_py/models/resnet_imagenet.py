"""Residual networks for large images (He et al., Deep Residual Learning, CVPR 2016, table 1).

A 7x7 convolution and a 3x3 max pooling, each of stride 2, four stages of blocks with 64, 128, 256 and 512 channels,
global average pooling and a linear layer. A block is `y = relu(branch(x) + shortcut(x))`; where it changes the shape,
the shortcut is a 1x1 convolution with BatchNorm (option B). Depths 18 and 34 have two 3x3 convolutions a block, the
others a bottleneck of 1x1, 3x3 and 1x1 with four times the channels at its end.

As in torchvision, a bottleneck halves the image in its 3x3 convolution and not, as in the paper, in the first 1x1: so
no pixel is skipped ("v1.5").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels, normalised

# Five halvings leave one position, so a batch of training images this small needs two of them for BatchNorm.
MINIMUM_PIXELS = 32
STAGE_CHANNELS = (64, 128, 256, 512)


class Residual(nn.Module):
    """`relu(branch(x) + shortcut(x))`, with convolutions over `NDIM` axes. The input is not changed."""

    NDIM: ClassVar[int] = 2
    EXPANSION: ClassVar[int] = 1

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut
        # In place is safe: batch norm keeps its input for the backward pass, not its output, and addition neither.
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y += self.shortcut(x)
        activated: Tensor = self.relu(y)
        return activated


class Block(Residual):
    """Two 3x3 convolutions with BatchNorm: `[B, in, H, W]` → `[B, channels, H/stride, W/stride]`."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        branch = nn.Sequential(
            *normalised(in_channels, channels, 3, stride, ndim=self.NDIM),
            nn.ReLU(inplace=True),
            *normalised(channels, channels, 3, ndim=self.NDIM),
        )
        super().__init__(branch, _shortcut(self.NDIM, in_channels, channels, stride))


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm: `[B, in, H, W]` → `[B, 4 · channels, H/stride, W/stride]`."""

    EXPANSION = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        out_channels = self.EXPANSION * channels
        branch = nn.Sequential(
            *normalised(in_channels, channels, 1, ndim=self.NDIM),
            nn.ReLU(inplace=True),
            *normalised(channels, channels, 3, stride, ndim=self.NDIM),
            nn.ReLU(inplace=True),
            *normalised(channels, out_channels, 1, ndim=self.NDIM),
        )
        super().__init__(branch, _shortcut(self.NDIM, in_channels, out_channels, stride))


class ResNet(nn.Module):
    """Four stages with `num_blocks` blocks: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(
        self, block: type[Block | Bottleneck], num_blocks: tuple[int, ...], in_channels: int, num_classes: int
    ) -> None:
        super().__init__()
        width = STAGE_CHANNELS[0]
        self.stem = nn.Sequential(*self._stem(in_channels, width))
        blocks: list[nn.Module] = []
        for stage, (channels, count) in enumerate(zip(STAGE_CHANNELS, num_blocks, strict=True)):
            for number in range(count):
                blocks.append(block(width, channels, stride=2 if stage > 0 and number == 0 else 1))
                width = block.EXPANSION * channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        logits: Tensor = self.fc(x.mean(tuple(range(2, x.ndim))))
        return logits

    def _stem(self, in_channels: int, width: int) -> list[nn.Module]:
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        return [*normalised(in_channels, width, 7, stride=2), nn.ReLU(inplace=True), pool]


def _shortcut(ndim: int, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(*normalised(in_channels, out_channels, 1, stride, ndim=ndim))


@dataclass(frozen=True)
class _ResNetSettings(ModelSettings):
    """Settings that the depths share."""

    BLOCK: ClassVar[type[Block | Bottleneck]]
    NUM_BLOCKS: ClassVar[tuple[int, ...]]

    zero_init_residual: bool = setting(False, "start every block as its shortcut: zeros in the weight of its last norm")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        model = ResNet(self.BLOCK, self.NUM_BLOCKS, channels, num_classes)
        if self.zero_init_residual:
            for block in model.blocks:
                assert isinstance(block, Residual)
                norm = block.branch[-1]
                assert isinstance(norm, nn.BatchNorm2d)
                nn.init.zeros_(norm.weight)
        return model


class ResNet18(_ResNetSettings):
    """ResNet-18, 11.7 M parameters with 1000 classes."""

    NAME = "resnet18"
    BLOCK = Block
    NUM_BLOCKS = (2, 2, 2, 2)


class ResNet34(_ResNetSettings):
    """ResNet-34, 21.8 M parameters with 1000 classes."""

    NAME = "resnet34"
    BLOCK = Block
    NUM_BLOCKS = (3, 4, 6, 3)


class ResNet50(_ResNetSettings):
    """ResNet-50, 25.6 M parameters with 1000 classes."""

    NAME = "resnet50"
    BLOCK = Bottleneck
    NUM_BLOCKS = (3, 4, 6, 3)


class ResNet101(_ResNetSettings):
    """ResNet-101, 44.5 M parameters with 1000 classes."""

    NAME = "resnet101"
    BLOCK = Bottleneck
    NUM_BLOCKS = (3, 4, 23, 3)


class ResNet152(_ResNetSettings):
    """ResNet-152, 60.2 M parameters with 1000 classes."""

    NAME = "resnet152"
    BLOCK = Bottleneck
    NUM_BLOCKS = (3, 8, 36, 3)
