"""3-D ResNets: shapes of the stages and shortcuts. The rest: test_registry."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.models import MODELS
from crossbow_py.models.resnet3d import Block3d, ResNet3d


def build_on_meta(name: str, num_classes: int = 400) -> ResNet3d:
    with torch.device("meta"):
        model = MODELS[name]().build((3, 16, 112, 112), num_classes)
    assert isinstance(model, ResNet3d)
    return model


def test_stages_halve_frames_and_image_where_they_begin() -> None:
    model = build_on_meta("resnet3d18")
    x = model.stem(torch.empty(2, 3, 16, 112, 112, device="meta"))
    shapes = [tuple((x := block(x)).shape[1:]) for block in model.blocks]
    stages = [(64, 16, 56, 56), (128, 8, 28, 28), (256, 4, 14, 14), (512, 2, 7, 7)]
    assert shapes == [shape for shape in stages for _ in range(2)]


def test_block_with_a_branch_of_zeros_is_its_shortcut_and_leaves_the_input_alone() -> None:
    block, x = Block3d(3, 3, stride=1), torch.randn(2, 3, 4, 4, 4)
    nn.init.zeros_(block.branch[-1].weight)
    kept = x.clone()
    assert torch.equal(block(x), kept.relu())
    assert torch.equal(x, kept)
