"""LeNet: pooling before ReLU, dropout as a module. The rest: test_registry."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.models import LeNet


def test_pooling_before_relu_equals_relu_before_pooling() -> None:
    model = LeNet().build((1, 16, 16), 3)
    first, pool, relu, second, *_, flatten, hidden, _, output = model
    x = torch.randn(4, 1, 16, 16)
    y = pool(second(pool(first(x).relu())).relu())
    assert isinstance(relu, nn.ReLU)
    assert torch.equal(model(x), output(hidden(flatten(y)).relu()))
