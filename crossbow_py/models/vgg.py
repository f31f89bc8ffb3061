"""VGG-16 for small images: configuration D of Simonyan and Zisserman (2015) with BatchNorm and a narrow classifier.

The two 4096-unit layers made for 224-pixel images become one of 512, as in Liu and Deng (Very Deep Convolutional Neural
Network Based Image Classification Using Small Training Sample Size, ACPR 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings, input_channels, normalised

# Five poolings halve the image five times.
MINIMUM_PIXELS = 32
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
CLASSIFIER_UNITS = 512


class VGG(nn.Module):
    """13 convolutions with BatchNorm, then two linear layers: `[B, in_channels, H, W]` → logits `[B, num_classes]`.

    What is left of images larger than 32x32 is averaged.
    """

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for stage in STAGES:
            for channels in stage:
                layers += [*normalised(width, channels, 3), nn.ReLU(inplace=True)]
                width = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *_dropout(dropout),
            nn.Linear(width, CLASSIFIER_UNITS),
            nn.ReLU(inplace=True),
            *_dropout(dropout),
            nn.Linear(CLASSIFIER_UNITS, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def _dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share else []


@dataclass(frozen=True)
class VGG16(ModelSettings):
    """VGG-16 with BatchNorm for images of at least 32x32 pixels, 15 M parameters."""

    NAME = "vgg16"

    dropout: float = setting(0.5, "share of the classifier's inputs dropped while training", minimum=0, below=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels = input_channels(self.NAME, input_shape, MINIMUM_PIXELS)
        return VGG(channels, num_classes, self.dropout)
