"""ResNets for large images: parameter counts as published, shapes, shortcuts, and fused rounds of the smallest one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.models import MODELS, ResNet18, ResNet50
from crossbow_py.models.resnet_imagenet import Block, Bottleneck
from tests.support import features, make_tasks, plan

SHAPE = (3, 32, 32)


def build_on_meta(name: str, shape: tuple[int, ...] = (3, 224, 224)) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]().build(shape, 1000)


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    torch.manual_seed(1)
    return ResNet18().build(SHAPE, 10)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032), ("resnet101", 44_549_160),
     ("resnet152", 60_192_808)],
)  # fmt: skip
def test_parameters_of_each_depth_match_what_is_published(name: str, parameters: int) -> None:
    model = build_on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"])
def test_depth_counts_layers_with_weights_outside_of_shortcuts(name: str) -> None:
    layers = [path for path, module in build_on_meta(name).named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert sum("shortcut" not in path for path in layers) == int(name.removeprefix("resnet"))
    assert sum("shortcut" in path for path in layers) == (3 if name in {"resnet18", "resnet34"} else 4)


def test_stages_halve_the_image_from_56_to_7_pixels() -> None:
    model = build_on_meta("resnet50")
    x = model.stem(torch.empty(2, 3, 224, 224, device="meta"))
    shapes = {tuple((x := block(x)).shape[1:]) for block in model.blocks}
    assert shapes == {(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)}


def test_bottleneck_halves_the_image_in_its_3x3_convolution() -> None:
    strides = [layer.stride for layer in Bottleneck(8, 4, stride=2).branch if isinstance(layer, nn.Conv2d)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


def test_block_with_a_branch_of_zeros_is_its_shortcut_and_leaves_the_input_alone() -> None:
    same, changed = Block(3, 3, stride=1), Block(3, 5, stride=2)
    for block in (same, changed):
        nn.init.zeros_(block.branch[-1].weight)
    x = torch.randn(2, 3, 4, 4)
    kept = x.clone()
    assert torch.equal(same(x), x.relu())
    expected = nn.functional.conv2d(x, changed.shortcut[0].weight, stride=2)
    torch.testing.assert_close(changed(x), nn.functional.batch_norm(expected, None, None, training=True).relu())
    assert torch.equal(x, kept)


def test_convolutions_after_building_have_the_standard_deviation_of_he(resnet18: nn.Module) -> None:
    weight = resnet18.blocks[-1].branch[0].weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.03)


@pytest.mark.parametrize("zero", [False, True])
def test_last_norm_of_a_block_starts_at_zero_by_option_alone(zero: bool) -> None:
    model = ResNet18(zero_init_residual=zero).build(SHAPE, 10)
    assert [bool(block.branch[-1].weight.any()) for block in model.blocks] == [not zero] * 8
    assert all(block.branch[1].weight.all() for block in model.blocks)


def test_forward_and_backward_reach_every_parameter(resnet18: nn.Module) -> None:
    logits = resnet18(torch.randn(2, *SHAPE))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(resnet18.parameters()))
    assert logits.shape == (2, 10)
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


def test_forward_in_channels_last_equals_the_default_layout_and_keeps_its_own(resnet18: nn.Module) -> None:
    model, x = resnet18.eval(), torch.randn(2, *SHAPE)
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert model.blocks[:2](model.stem(x)).is_contiguous(memory_format=torch.channels_last)


def test_fused_round_of_resnet18_equals_serial_and_loops_over_nothing(resnet18: nn.Module) -> None:
    banks, looped = [], []
    for executor in ("serial", "fused"):
        tasks = make_tasks(resnet18.train, data=features(16, SHAPE, 10), batch_size=4, precision=FP32, order="blocks")
        runner = EXECUTORS[executor](tasks)
        runner.submit(plan(tasks, 0, 0.05))
        runner.drain()
        runner.close()
        banks.append(tasks.bank)
        looped.append(getattr(runner, "looped", []))
    assert looped == [[], []]
    for learner in range(2):
        serial, fused = (bank.learner_state(learner) for bank in banks)
        for name, expected in serial.items():
            assert (fused[name] - expected).float().norm() <= 1e-5 * (expected.float().norm() + 1e-3), name


@pytest.mark.parametrize("shape", [(64,), (3, 28, 28)])
def test_build_for_small_samples_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^model=resnet50 needs images .* 32x32 pixels, got samples of .*model=mlp"):
        ResNet50().build(shape, 10)
