"""The base of every model's settings, and checks of input shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from crossbow_py.core.errors import UserError


class ModelSettings(ABC):
    """Base of the settings of every model, which are frozen dataclasses."""

    GROUP: ClassVar[str] = "model"
    NAME: ClassVar[str]

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a new, randomly initialised module from inputs `[B, *input_shape]` to logits `[B, num_classes]`.

        Raises:
            UserError: the model cannot take inputs of that shape.
        """


def image_shape(model: str, input_shape: tuple[int, ...], minimum_pixels: int) -> tuple[int, int, int]:
    """Check that samples are images (channels, height, width) of at least `minimum_pixels` a side; return that shape.

    Raises:
        UserError: they are not; names the model, the rule and the shape received.
    """
    rule = f"images (channels, height, width) of at least {minimum_pixels}x{minimum_pixels} pixels"
    if len(input_shape) != 3 or min(input_shape[1:]) < minimum_pixels:
        raise UserError(
            f"model={model} needs {rule}, got samples of shape {input_shape}; choose another data set or model=mlp."
        )
    channels, height, width = input_shape
    return channels, height, width


def clip_shape(
    model: str, input_shape: tuple[int, ...], minimum_frames: int, minimum_pixels: int
) -> tuple[int, int, int, int]:
    """Check that samples are clips (channels, frames, height, width), and return that shape.

    Raises:
        UserError: the clips are too short or too small, or no clips; names the model, the rule and the shape received.
    """
    rule = (
        f"clips (channels, frames, height, width) of at least {minimum_frames} frames of "
        f"{minimum_pixels}x{minimum_pixels} pixels"
    )
    if len(input_shape) != 4 or input_shape[1] < minimum_frames or min(input_shape[2:]) < minimum_pixels:
        raise UserError(
            f"model={model} needs {rule}, got samples of shape {input_shape}; choose another data set or model=mlp."
        )
    channels, frames, height, width = input_shape
    return channels, frames, height, width
