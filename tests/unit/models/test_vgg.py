"""VGG-16 for small images: parameter count by hand, shapes, dropout as modules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import VGG16
from crossbow_py.models.vgg import VGG


@pytest.fixture(scope="module")
def vgg16() -> nn.Module:
    return VGG16().build((3, 32, 32), 10)


def test_parameters_on_cifar10_match_the_hand_count(vgg16: nn.Module) -> None:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * into * out + 2 * out for into, out in itertools.pairwise(widths))
    classifier = (512 * 512 + 512) + (512 * 10 + 10)
    count = sum(parameter.numel() for parameter in vgg16.parameters())
    assert count == convolutions + classifier == 14_986_698


def test_forward_and_backward_of_a_batch_of_one_reach_every_parameter(vgg16: nn.Module) -> None:
    logits = vgg16(torch.randn(1, 3, 32, 32))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(vgg16.parameters()))
    assert logits.shape == (1, 10)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_forward_of_larger_images_averages_the_positions_left(vgg16: nn.Module) -> None:
    with torch.no_grad():
        assert vgg16.eval()(torch.randn(1, 3, 64, 40)).shape == (1, 10)


def test_dropout_of_zero_leaves_no_dropout_modules() -> None:
    with torch.device("meta"):
        modules = {share: VGG(3, 10, share).modules() for share in (0.0, 0.5)}
    counts = {share: sum(isinstance(module, nn.Dropout) for module in found) for share, found in modules.items()}
    assert counts == {0.0: 0, 0.5: 2}


def test_build_for_mnist_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"^model=vgg16 needs images .* 32x32 pixels, got .*\(1, 28, 28\)"):
        VGG16().build((1, 28, 28), 10)
