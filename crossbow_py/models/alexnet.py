"""AlexNet with one tower (Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014).

Five convolutions, three of them with a 3x3 max pooling of stride 2, and a classifier of two layers of 4096 units with
dropout: 61,100,840 parameters with 1000 classes, nine in ten of them in the classifier. As in torchvision, there is no
local response normalisation, and the features of an image are averaged to 6x6 positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels

# The smallest image with a position left after the last pooling: 63 → 15 → 7 → 3 → 1.
MINIMUM_PIXELS = 63
POSITIONS = 6
CLASSIFIER_UNITS = 4096


class OneTower(nn.Module):
    """Five convolutions, then three linear layers: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        # Pooling before ReLU gives the same values with a quarter of the work.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=2), *_pooled(),
            nn.Conv2d(64, 192, 5, padding=2), *_pooled(),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), *_pooled(),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(POSITIONS)
        self.classifier = nn.Sequential(
            _dropout(dropout),
            nn.Linear(256 * POSITIONS**2, CLASSIFIER_UNITS),
            nn.ReLU(inplace=True),
            _dropout(dropout),
            nn.Linear(CLASSIFIER_UNITS, CLASSIFIER_UNITS),
            nn.ReLU(inplace=True),
            nn.Linear(CLASSIFIER_UNITS, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


def _pooled() -> list[nn.Module]:
    return [nn.MaxPool2d(3, stride=2), nn.ReLU(inplace=True)]


def _dropout(share: float) -> nn.Module:
    """Return a module even for a share of zero, so that parameters keep their names."""
    return nn.Dropout(share) if share else nn.Identity()


@dataclass(frozen=True)
class AlexNet(ModelSettings):
    """AlexNet for images of at least 63x63 pixels, 61.1 M parameters with 1000 classes."""

    NAME = "alexnet"

    dropout: float = setting(0.5, "share of the classifier's inputs dropped while training", minimum=0, below=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        return OneTower(channels, num_classes, self.dropout)
