"""The multi-layer perceptron: a forward by hand, logistic regression, dropout. The rest: test_registry."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.models import MLP


def test_forward_of_chosen_weights_equals_numbers_worked_out_by_hand() -> None:
    model = MLP(hidden=(2,)).build((2,), 1)
    _, hidden, _, output = model
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
        hidden.bias.copy_(torch.tensor([0.5, 0.0]))
        output.weight.copy_(torch.tensor([[2.0, 5.0]]))
        output.bias.copy_(torch.tensor([-1.0]))
    # hidden: [1 + 4 + 0.5, -1] → relu [5.5, 0]; output 11 + 0 - 1
    assert model(torch.tensor([[1.0, 2.0]])).item() == 10.0


def test_no_hidden_layers_is_logistic_regression() -> None:
    model = MLP(hidden=()).build((1, 8, 8), 10)
    assert [type(module) for module in model] == [nn.Flatten, nn.Linear]
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)


def test_dropout_when_set_follows_every_hidden_layer() -> None:
    model = MLP(hidden=(4, 4), dropout=0.5).build((8,), 2)
    assert [module.p for module in model if isinstance(module, nn.Dropout)] == [0.5, 0.5]
