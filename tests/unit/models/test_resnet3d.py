"""3-D ResNets: parameter counts, shapes of the stages, a short clip forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import MODELS, ResNet3d10, resnet_imagenet
from crossbow_py.models.resnet3d import Block3d, ResNet3d


def build_on_meta(name: str, num_classes: int = 400) -> ResNet3d:
    with torch.device("meta"):
        model = MODELS[name]().build((3, 16, 112, 112), num_classes)
    assert isinstance(model, ResNet3d)
    return model


def test_parameters_of_depth_18_match_what_is_published() -> None:
    assert sum(parameter.numel() for parameter in build_on_meta("resnet3d18").parameters()) == 33_371_472


def test_parameters_of_depth_10_match_the_hand_count() -> None:
    stem, norm = 3 * 64 * 3 * 7 * 7, 2
    first = 2 * (27 * 64 * 64) + 2 * 64 * norm
    widths = [(64, 128), (128, 256), (256, 512)]
    others = sum(27 * (into * out + out * out) + into * out + 3 * out * norm for into, out in widths)
    count = sum(parameter.numel() for parameter in build_on_meta("resnet3d10", 10).parameters())
    assert count == stem + 64 * norm + first + others + 512 * 10 + 10


@pytest.mark.parametrize(("name", "depth"), [("resnet3d10", 10), ("resnet3d18", 18)])
def test_depth_counts_layers_with_weights_outside_of_shortcuts(name: str, depth: int) -> None:
    layers = [path for path, module in build_on_meta(name).named_modules() if isinstance(module, nn.Conv3d | nn.Linear)]
    assert sum("shortcut" not in path for path in layers) == depth
    assert sum("shortcut" in path for path in layers) == 3


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


def test_forward_and_backward_reach_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet_imagenet, "STAGE_CHANNELS", (4, 6, 8, 8))
    model = ResNet3d10().build((3, 8, 16, 16), 10)
    logits = model(torch.randn(2, 3, 8, 16, 16))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(model.parameters()))
    assert logits.shape == (2, 10)
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 7, 32, 32), (3, 8, 16, 15)])
def test_build_for_unfit_samples_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    message = r"^model=resnet3d10 needs clips .* 8 frames of 16x16 pixels, got samples of .*model=mlp"
    with pytest.raises(UserError, match=message):
        ResNet3d10().build(shape, 10)
