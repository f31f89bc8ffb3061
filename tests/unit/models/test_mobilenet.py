"""MobileNetV2: the published parameter count, resolutions of the stages, blocks by hand and widths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import MobileNet
from crossbow_py.models.mobilenet import InvertedResidual, MobileNetV2, scaled


@pytest.fixture(scope="module")
def narrow() -> MobileNetV2:
    torch.manual_seed(2)
    return MobileNetV2(0.25, 3, 10)


def on_meta(width: float = 1.0) -> MobileNetV2:
    with torch.device("meta"):
        model = MobileNet(width=width).build((3, 32, 32), 1000)
    assert isinstance(model, MobileNetV2)
    return model


@pytest.mark.parametrize(("width", "parameters"), [(1.0, 3_504_872), (1.4, 6_108_776), (0.5, 1_968_680)])
def test_parameters_of_a_width_match_what_is_published_for_large_images(width: float, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(width).parameters()) == parameters


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


def test_convolutions_after_building_have_the_standard_deviation_of_he() -> None:
    project = InvertedResidual(16, 96, expansion=6, stride=1).layers[-2]
    assert project.weight.std().item() == pytest.approx(math.sqrt(2 / 96), rel=0.03)


def test_forward_and_backward_of_a_batch_of_one_reach_every_parameter(narrow: MobileNetV2) -> None:
    logits = narrow.train()(torch.randn(1, 3, 16, 16))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(narrow.parameters()))
    assert logits.shape == (1, 10)
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


def test_forward_in_channels_last_equals_the_default_layout_and_keeps_its_own(narrow: MobileNetV2) -> None:
    model, x = narrow.eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert model.features(x).is_contiguous(memory_format=torch.channels_last)


def test_width_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model\.width must be greater than 0, got 0"):
        MobileNet(width=0)


@pytest.mark.parametrize("shape", [(64,), (3, 12, 32), (3, 8, 32, 32)])
def test_build_for_unfit_samples_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^model=mobilenet needs images .* 16x16 pixels, got samples of .*model=mlp"):
        MobileNet().build(shape, 10)
