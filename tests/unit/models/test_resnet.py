"""ResNets for small images: the option-A shortcut. The rest: test_registry."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.models.resnet import BasicBlock


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
