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

from crossbow_py.core.settings import check, setting
from crossbow_py.models.base import ModelSettings, image_shape

# Five halvings leave one position, so a batch of training images this small needs two of them for BatchNorm.
MINIMUM_PIXELS = 32
STAGE_CHANNELS = (64, 128, 256, 512)


class Residual(nn.Module):
    """`relu(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut
        # In place is safe: batch norm keeps its input for the backward pass, not its output, and addition neither.
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; the input is not changed."""
        y = self.branch(x)
        y += self.shortcut(x)
        activated: Tensor = self.relu(y)
        return activated


class Block(Residual):
    """Two 3x3 convolutions with BatchNorm: `[B, in, H, W]` → `[B, channels, H/stride, W/stride]`."""

    EXPANSION: ClassVar[int] = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        branch = nn.Sequential(
            _convolution(in_channels, channels, 3, stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            _convolution(channels, channels, 3),
            nn.BatchNorm2d(channels),
        )
        super().__init__(branch, _shortcut(in_channels, channels, stride))


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm: `[B, in, H, W]` → `[B, 4 · channels, H/stride, W/stride]`."""

    EXPANSION: ClassVar[int] = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        out_channels = self.EXPANSION * channels
        branch = nn.Sequential(
            _convolution(in_channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            _convolution(channels, channels, 3, stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            _convolution(channels, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )
        super().__init__(branch, _shortcut(in_channels, out_channels, stride))


class ResNet(nn.Module):
    """Four stages with `num_blocks` blocks: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(
        self, block: type[Block | Bottleneck], num_blocks: tuple[int, ...], in_channels: int, num_classes: int
    ) -> None:
        super().__init__()
        width = STAGE_CHANNELS[0]
        self.stem = nn.Sequential(
            _convolution(in_channels, width, 7, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        for stage, (channels, count) in enumerate(zip(STAGE_CHANNELS, num_blocks, strict=True)):
            for number in range(count):
                blocks.append(block(width, channels, stride=2 if stage > 0 and number == 0 else 1))
                width = block.EXPANSION * channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `[B, num_classes]` of a batch of images."""
        logits: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution without a bias, which BatchNorm would remove, with He initialisation by the channels out."""
    convolution = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _zero_last_norms(model: ResNet) -> None:
    for block in model.blocks:
        assert isinstance(block, Residual)
        norm = block.branch[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.zeros_(norm.weight)


@dataclass(frozen=True)
class _ResNetSettings(ModelSettings):
    """Settings that the depths share."""

    BLOCK: ClassVar[type[Block | Bottleneck]]
    NUM_BLOCKS: ClassVar[tuple[int, ...]]

    zero_init_residual: bool = setting(False, "start every block as its shortcut: zeros in the weight of its last norm")

    def __post_init__(self) -> None:
        check(self)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a module of logits `[B, num_classes]` from images `[B, channels, H, W]` of at least 32x32 pixels."""
        channels, _, _ = image_shape(self.NAME, input_shape, MINIMUM_PIXELS)
        model = ResNet(self.BLOCK, self.NUM_BLOCKS, channels, num_classes)
        if self.zero_init_residual:
            _zero_last_norms(model)
        return model


@dataclass(frozen=True)
class ResNet18(_ResNetSettings):
    """ResNet-18, 11.7 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "resnet18"
    BLOCK: ClassVar[type[Block | Bottleneck]] = Block
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


@dataclass(frozen=True)
class ResNet34(_ResNetSettings):
    """ResNet-34, 21.8 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "resnet34"
    BLOCK: ClassVar[type[Block | Bottleneck]] = Block
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True)
class ResNet50(_ResNetSettings):
    """ResNet-50, 25.6 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "resnet50"
    BLOCK: ClassVar[type[Block | Bottleneck]] = Bottleneck
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True)
class ResNet101(_ResNetSettings):
    """ResNet-101, 44.5 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "resnet101"
    BLOCK: ClassVar[type[Block | Bottleneck]] = Bottleneck
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (3, 4, 23, 3)


@dataclass(frozen=True)
class ResNet152(_ResNetSettings):
    """ResNet-152, 60.2 M parameters with 1000 classes."""

    NAME: ClassVar[str] = "resnet152"
    BLOCK: ClassVar[type[Block | Bottleneck]] = Bottleneck
    NUM_BLOCKS: ClassVar[tuple[int, ...]] = (3, 8, 36, 3)
