"""DenseNets: the published parameter count, channels of blocks and transitions, what a layer leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import DenseNet40, DenseNet121
from crossbow_py.models.densenet import DenseLayer, DenseNet


@pytest.fixture(scope="module")
def small() -> DenseNet:
    torch.manual_seed(1)
    return DenseNet((1, 2, 1, 1), 3, 10)


def on_meta() -> DenseNet:
    with torch.device("meta"):
        model = DenseNet121().build((3, 224, 224), 1000)
    assert isinstance(model, DenseNet)
    return model


def test_parameters_of_121_match_what_is_published() -> None:
    model = on_meta()
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_978_856
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 121


def test_blocks_end_with_the_channels_and_positions_of_the_papers_table() -> None:
    model = on_meta()
    x, shapes = model.stem(torch.empty(2, 3, 224, 224, device="meta")), []
    for module in model.blocks:
        x = module(x)
        if isinstance(module, nn.AvgPool2d):
            shapes.append(tuple(x.shape[1:]))
    assert [*shapes, tuple(x.shape[1:])] == [(128, 28, 28), (256, 14, 14), (512, 7, 7), (1024, 7, 7)]


def hand_count_of_40(classes: int = 10) -> int:
    """DenseNet-BC, k = 12: a stem to 24 channels, three blocks of six layers, two transitions that halve channels."""
    total, width = 3 * 9 * 24, 24
    for block in range(3):
        if block:
            total += 2 * width + width * (width // 2)
            width //= 2
        for _ in range(6):
            total += 2 * width + width * 48 + 2 * 48 + 48 * 9 * 12
            width += 12
    return total + 2 * width + width * classes + classes


def test_parameters_and_depth_of_40_match_what_is_published() -> None:
    with torch.device("meta"):
        model = DenseNet40().build((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 176_122 == hand_count_of_40()
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 40


def test_blocks_of_40_halve_the_image_twice() -> None:
    torch.manual_seed(3)
    model, x = DenseNet40().build((1, 8, 8), 10), torch.randn(1, 1, 8, 8)
    assert isinstance(model, DenseNet)
    assert model.blocks(model.stem(x)).shape == (1, 132, 2, 2)
    gradients = torch.autograd.grad(model(x).logsumexp(1).sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


def test_dense_layer_gives_its_input_untouched_and_32_channels_behind_it() -> None:
    layer, x = DenseLayer(5), torch.randn(2, 5, 4, 4)
    kept = x.clone()
    found = layer(x)
    assert found.shape == (2, 37, 4, 4)
    assert torch.equal(found[:, :5], kept) and torch.equal(x, kept)
    norm, _, narrow, other, _, wide = layer.layer
    by_hand = wide(other(narrow(norm(x).relu())).relu())
    torch.testing.assert_close(found[:, 5:], by_hand)


def test_convolutions_after_building_have_the_standard_deviation_of_he() -> None:
    weight = DenseLayer(256).layer[2].weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.03)


def test_forward_and_backward_reach_every_parameter(small: DenseNet) -> None:
    logits = small.train()(torch.randn(2, 3, 32, 32))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(small.parameters()))
    assert logits.shape == (2, 10)
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


def test_forward_in_channels_last_equals_the_default_layout_and_keeps_its_own(small: DenseNet) -> None:
    model, x = small.eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert model.blocks[:1](model.stem(x)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(64,), (3, 28, 28), (3, 8, 32, 32)])
def test_build_for_unfit_samples_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^model=densenet121 needs images .* 32x32 pixels, got samples of .*model=mlp"):
        DenseNet121().build(shape, 10)


def test_build_of_40_for_tiny_images_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^model=densenet40 needs images .* 8x8 pixels, got samples of .*model=mlp"):
        DenseNet40().build((3, 4, 4), 10)
