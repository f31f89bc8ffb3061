"""LeNet: parameter count of Caffe's network, the shapes it takes and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import LeNet


def test_parameters_on_mnist_match_caffes_lenet() -> None:
    convolutions = (25 * 1 * 20 + 20) + (25 * 20 * 50 + 50)
    linear = (4 * 4 * 50 * 500 + 500) + (500 * 10 + 10)
    model = LeNet().build((1, 28, 28), 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == convolutions + linear == 431_080


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 16, 17)])
def test_forward_and_backward_of_image_shapes_give_logits_and_gradients(shape: tuple[int, ...]) -> None:
    model = LeNet().build(shape, 7)
    logits = model(torch.randn(2, *shape))
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    assert logits.shape == (2, 7)
    assert all(gradient.count_nonzero() for gradient in gradients)


def test_pooling_before_relu_equals_relu_before_pooling() -> None:
    model = LeNet().build((1, 16, 16), 3)
    first, pool, relu, second, *_, flatten, hidden, _, output = model
    x = torch.randn(4, 1, 16, 16)
    y = pool(second(pool(first(x).relu())).relu())
    assert isinstance(relu, nn.ReLU)
    assert torch.equal(model(x), output(hidden(flatten(y)).relu()))


def test_dropout_when_set_is_a_module_the_engine_can_find() -> None:
    shares = [module.p for module in LeNet(dropout=0.25).build((1, 28, 28), 10) if isinstance(module, nn.Dropout)]
    assert shares == [0.25]
    assert not any(isinstance(module, nn.Dropout) for module in LeNet().build((1, 28, 28), 10))


def test_build_for_the_8x8_digits_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"^model=lenet needs images .* 16x16 pixels, got samples of shape \(1, 8, 8\)"):
        LeNet().build((1, 8, 8), 10)


def test_dropout_of_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.dropout must be less than 1, got 1\.0"):
        LeNet(dropout=1.0)
