"""The base of every model's settings, and checks of input shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, from_mapping, setting
from crossbow_py.models.lora import LoRA


@dataclass(frozen=True)
class ModelSettings(ABC):
    """Base of the settings of every model, which are frozen dataclasses too."""

    GROUP: ClassVar[str] = "model"
    NAME: ClassVar[str]

    _: KW_ONLY
    lora: dict[str, Any] = setting(
        {},
        "adapters to train instead, by PEFT: {rank: 8, alpha: 16, dropout: 0, targets: [names], trained: [names], "
        "save_merged: false}",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.lora:
            from_mapping(LoRA, {"model": nn.Identity, **self.lora}, "model.lora")

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build the module, with adapters if there are to be any. Raises UserError."""
        build = partial(self.build, input_shape, num_classes)
        return LoRA(build, **self.lora)() if self.lora else build()

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a new, randomly initialised module from inputs `[B, *input_shape]` to logits `[B, num_classes]`.

        Raises:
            UserError: the model cannot take inputs of that shape.
        """


def input_channels(model: str, input_shape: tuple[int, ...], minimum_pixels: int, minimum_frames: int = 0) -> int:
    """Check samples, images (channels, height, width) or, if there must be frames, clips. Return their channels.

    Raises:
        UserError: they are no such samples or too small; names the model, the rule and the shape received.
    """
    rule, ndim = "images (channels, height, width) of at least", 3
    if minimum_frames:
        rule, ndim = f"clips (channels, frames, height, width) of at least {minimum_frames} frames of", 4
    if len(input_shape) != ndim or min(input_shape[-2:]) < minimum_pixels or input_shape[1] < minimum_frames:
        needs = f"model={model} needs {rule} {minimum_pixels}x{minimum_pixels} pixels"
        raise UserError(f"{needs}, got samples of shape {input_shape}; choose another data set or model=mlp.")
    return input_shape[0]


def normalised(
    in_channels: int, out_channels: int, size: int, stride: int = 1, *, groups: int = 1, ndim: int = 2
) -> list[nn.Module]:
    """Return a convolution without a bias, with He initialisation by the channels out, and BatchNorm, over 2 or 3 axes.

    BatchNorm would remove a bias.
    """
    kind, norm = (nn.Conv2d, nn.BatchNorm2d) if ndim == 2 else (nn.Conv3d, nn.BatchNorm3d)
    convolution = kind(in_channels, out_channels, size, stride, padding=size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, norm(out_channels)]
