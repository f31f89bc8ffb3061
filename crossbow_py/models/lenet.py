"""LeNet for small images: Caffe's MNIST network (after LeCun et al., 1998), with ReLU after each pooling.

Two 5x5 convolutions with 20 and 50 channels, each followed by 2x2 max-pooling, a hidden layer of 500 units and the
output layer: 431,080 parameters on 28x28 grey images and 10 classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels

KERNEL = 5
CHANNELS = (20, 50)
HIDDEN_UNITS = 500
# The smallest image with a position left after two convolutions without padding and two halvings: 16 → 12 → 6 → 2 → 1.
MINIMUM_PIXELS = 16


@dataclass(frozen=True)
class LeNet(ModelSettings):
    """LeNet for images of at least 16x16 pixels."""

    NAME = "lenet"

    dropout: float = setting(0.0, "share of hidden units dropped while training", minimum=0, below=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        width, sides = input_channels(self.NAME, input_shape, MINIMUM_PIXELS), list(input_shape[1:])
        layers: list[nn.Module] = []
        for channels in CHANNELS:
            # Pooling before ReLU gives the same values with a quarter of the work.
            layers += [nn.Conv2d(width, channels, KERNEL), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
            width, sides = channels, [(side - KERNEL + 1) // 2 for side in sides]
        layers += [nn.Flatten(), nn.Linear(width * sides[0] * sides[1], HIDDEN_UNITS), nn.ReLU(inplace=True)]
        if self.dropout:
            layers.append(nn.Dropout(self.dropout))
        return nn.Sequential(*layers, nn.Linear(HIDDEN_UNITS, num_classes))
