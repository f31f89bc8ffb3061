"""Residual networks for small images (He et al., Deep Residual Learning, CVPR 2016, section 4.2).

A 3x3 convolution, three stages of n blocks with 16, 32 and 64 channels, global average pooling and a linear layer:
depth 6n + 2. A block is `y = relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))`; where a stage halves the image, the
shortcut takes every second pixel and pads the new channels with zeros (option A, no parameters).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from crossbow_py.models.base import ModelSettings, input_channels

# Two halvings leave 2x2 positions, so that BatchNorm has something to average even for a batch of one.
MINIMUM_PIXELS = 8
STAGE_CHANNELS = (16, 32, 64)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut: `[B, in, H, W]` → `[B, out, H/stride, W/stride]`."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        # In place is safe: batch norm keeps its input for the backward pass, not its output, and addition neither.
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.new_channels = stride, out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self._shortcut(x)
        activated: Tensor = self.relu(y)
        return activated

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and not self.new_channels:
            return x
        before = self.new_channels // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))


class ResNet(nn.Module):
    """Residual network of depth 6n + 2: images `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, depth: int, in_channels: int, num_classes: int) -> None:
        super().__init__()
        assert (depth - 2) % 6 == 0, f"depth must be 6n + 2, got {depth}"
        width = STAGE_CHANNELS[0]
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        blocks: list[nn.Module] = []
        for stage, channels in enumerate(STAGE_CHANNELS):
            for block in range((depth - 2) // 6):
                blocks.append(BasicBlock(width, channels, stride=2 if stage > 0 and block == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)
        # He et al., Delving Deep into Rectifiers, 2015: std = sqrt(2 / (9 · channels out)).
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class _ResNetSettings(ModelSettings):
    """Settings that the depths share. The depth is in the name, so there is nothing to set."""

    DEPTH: ClassVar[int]

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        return ResNet(self.DEPTH, channels, num_classes)


class ResNet20(_ResNetSettings):
    """ResNet-20, 0.27 M parameters."""

    NAME = "resnet20"
    DEPTH = 20


class ResNet32(_ResNetSettings):
    """ResNet-32, 0.46 M parameters."""

    NAME = "resnet32"
    DEPTH = 32


class ResNet44(_ResNetSettings):
    """ResNet-44, 0.66 M parameters."""

    NAME = "resnet44"
    DEPTH = 44


class ResNet56(_ResNetSettings):
    """ResNet-56, 0.85 M parameters."""

    NAME = "resnet56"
    DEPTH = 56


class ResNet110(_ResNetSettings):
    """ResNet-110, 1.7 M parameters. The paper warms up at a learning rate of 0.01 first."""

    NAME = "resnet110"
    DEPTH = 110
