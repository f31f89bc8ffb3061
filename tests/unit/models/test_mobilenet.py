"""MobileNetV2: resolutions of the stages, blocks by hand and widths. The rest: test_registry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.models import MobileNet
from crossbow_py.models.mobilenet import InvertedResidual, MobileNetV2, scaled


def on_meta(width: float = 1.0) -> MobileNetV2:
    with torch.device("meta"):
        model = MobileNet(width=width).build((3, 32, 32), 1000)
    assert isinstance(model, MobileNetV2)
    return model


def test_blocks_halve_the_image_three_times() -> None:
    x, shapes = torch.empty(2, 3, 32, 32, device="meta"), []
    for module in on_meta().features:
        x = module(x)
        if isinstance(module, InvertedResidual):
            shapes.append(tuple(x.shape[1:]))
    assert len(shapes) == 17
    assert sorted(set(shapes)) == [
        (16, 32, 32), (24, 32, 32), (32, 16, 16), (64, 8, 8), (96, 8, 8), (160, 4, 4), (320, 4, 4),
    ]  # fmt: skip
    assert x.shape == (2, 1280, 4, 4)


def test_block_with_equal_shapes_adds_its_input_and_leaves_it_alone() -> None:
    block, x = InvertedResidual(4, 4, expansion=6, stride=1), torch.randn(2, 4, 5, 5)
    kept = x.clone()
    expand, norm, _, depthwise, other, _, project, last = block.layers
    assert (expand.weight.shape, depthwise.weight.shape) == ((24, 4, 1, 1), (24, 1, 3, 3))
    by_hand = last(project(other(depthwise(norm(expand(x)).clamp(0, 6))).clamp(0, 6)))
    torch.testing.assert_close(block(x), x + by_hand)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("out_channels", "stride"), [(6, 1), (4, 2)])
def test_block_that_changes_the_shape_has_no_shortcut(out_channels: int, stride: int) -> None:
    block, x = InvertedResidual(4, out_channels, expansion=1, stride=stride), torch.randn(2, 4, 6, 6)
    nn.init.zeros_(block.layers[-1].weight)
    y = block(x)
    assert y.shape == (2, out_channels, 6 // stride, 6 // stride)
    assert y.count_nonzero() == 0
    assert len(block.layers) == 5  # nothing is expanded


@pytest.mark.parametrize(
    ("channels", "width", "expected"), [(32, 1.0, 32), (32, 0.25, 8), (16, 0.25, 8), (24, 0.75, 24), (96, 0.35, 32)]
)
def test_scaled_channels_are_the_nearest_multiple_of_8_not_a_tenth_below(
    channels: int, width: float, expected: int
) -> None:
    assert scaled(channels, width) == expected
