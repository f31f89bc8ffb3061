"""VGG-16 for small images: configuration D of Simonyan and Zisserman (2015) with BatchNorm and a narrow classifier.

The two 4096-unit layers made for 224-pixel images become one of 512, as in Liu and Deng (Very Deep Convolutional Neural
Network Based Image Classification Using Small Training Sample Size, ACPR 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from crossbow_py.core.settings import check, setting
from crossbow_py.models.base import ModelSettings, image_shape

# Five poolings halve the image five times.
MINIMUM_PIXELS = 32
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
CLASSIFIER_UNITS = 512


class VGG(nn.Module):
    """13 convolutions with BatchNorm, then two linear layers: `[B, in_channels, H, W]` → logits `[B, num_classes]`."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for stage in STAGES:
            for channels in stage:
                layers += _convolution(width, channels)
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
        """Return the logits `[B, num_classes]` of a batch of images; larger ones than 32x32 are averaged at the end."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    """Return a 3x3 convolution without a bias, which BatchNorm would remove, BatchNorm and ReLU."""
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def _dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share else []


@dataclass(frozen=True)
class VGG16(ModelSettings):
    """VGG-16 with BatchNorm for images of at least 32x32 pixels, 15 M parameters."""

    NAME: ClassVar[str] = "vgg16"

    dropout: float = setting(0.5, "share of the classifier's inputs dropped while training", minimum=0, below=1)

    def __post_init__(self) -> None:
        check(self)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a module of logits `[B, num_classes]` from images `[B, channels, H, W]` of at least 32x32 pixels."""
        channels, _, _ = image_shape(self.NAME, input_shape, MINIMUM_PIXELS)
        return VGG(channels, num_classes, self.dropout)
