"""VGG-16 for small images: larger ones, dropout as modules. The rest: test_registry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.models import VGG16
from crossbow_py.models.vgg import VGG


@pytest.fixture(scope="module")
def vgg16() -> nn.Module:
    return VGG16().build((3, 32, 32), 10)


def test_forward_of_larger_images_averages_the_positions_left(vgg16: nn.Module) -> None:
    with torch.no_grad():
        assert vgg16.eval()(torch.randn(1, 3, 64, 40)).shape == (1, 10)


def test_dropout_of_zero_leaves_no_dropout_modules() -> None:
    with torch.device("meta"):
        modules = {share: VGG(3, 10, share).modules() for share in (0.0, 0.5)}
    counts = {share: sum(isinstance(module, nn.Dropout) for module in found) for share, found in modules.items()}
    assert counts == {0.0: 0, 0.5: 2}
