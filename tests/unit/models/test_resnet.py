"""ResNets: parameter counts worked out by hand, the option-A shortcut and the initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import MODELS, ResNet20, ResNet32
from crossbow_py.models.resnet import BasicBlock


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def hand_count(depth: int, classes: int = 10) -> int:
    """Weights of the paper's table 6 networks, 3x3 convolutions without bias and two numbers a BatchNorm channel."""
    blocks = (depth - 2) // 6
    stem = 3 * 9 * 16 + 2 * 16
    total = stem + 64 * classes + classes
    for into, out in ((16, 16), (16, 32), (32, 64)):
        first = into * out * 9 + out * out * 9 + 2 * 2 * out
        other = 2 * out * out * 9 + 2 * 2 * out
        total += first + (blocks - 1) * other
    return total


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet20", 269_722), ("resnet32", 464_154), ("resnet44", 658_586), ("resnet56", 853_018),
     ("resnet110", 1_727_962)],
)  # fmt: skip
def test_parameters_of_each_depth_match_the_paper(name: str, parameters: int) -> None:
    model = MODELS[name]().build((3, 32, 32), 10)
    assert count(model) == parameters == hand_count(int(name.removeprefix("resnet")))


def test_depth_of_resnet32_is_32_layers_with_weights() -> None:
    model = ResNet32().build((3, 32, 32), 10)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 32


def test_shortcut_where_the_stage_changes_takes_every_second_pixel_and_pads_with_zeros() -> None:
    block = BasicBlock(2, 4, stride=2)
    nn.init.zeros_(block.bn2.weight)  # the residual branch gives zero, so the output is relu(shortcut)
    x = torch.arange(1.0, 33.0).view(1, 2, 4, 4)
    y = block(x)
    assert y.shape == (1, 4, 2, 2)
    assert y[0, 1].tolist() == [[1, 3], [9, 11]]
    assert y[0, 2].tolist() == [[17, 19], [25, 27]]
    assert y[0, [0, 3]].count_nonzero() == 0


def test_shortcut_with_equal_shapes_is_the_input() -> None:
    block = BasicBlock(3, 3, stride=1)
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 3, 4, 4)
    kept = x.clone()
    assert torch.equal(block(x), x.relu())
    assert torch.equal(x, kept)


def test_convolutions_after_building_have_the_standard_deviation_of_he() -> None:
    model = ResNet20().build((3, 32, 32), 10)
    weight = model.blocks[-1].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.03)
    assert weight.mean().item() == pytest.approx(0, abs=0.002)
    assert model.fc.bias.count_nonzero() == 0


def test_forward_and_backward_of_a_batch_of_one_reach_every_parameter() -> None:
    model = ResNet20().build((1, 8, 8), 10)
    logits = model(torch.randn(1, 1, 8, 8))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(model.parameters()))
    assert logits.shape == (1, 10)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("shape", [(64,), (3, 4, 32), (2, 3, 32, 32)])
def test_build_for_samples_that_are_no_images_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^model=resnet20 needs images .* 8x8 pixels, got samples of .*model=mlp"):
        ResNet20().build(shape, 10)
