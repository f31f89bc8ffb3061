"""ResNets for large images: shapes, shortcuts, fused rounds of the smallest one. The rest: test_registry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.models import MODELS, ResNet18
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


@pytest.mark.parametrize("zero", [False, True])
def test_last_norm_of_a_block_starts_at_zero_by_option_alone(zero: bool) -> None:
    model = ResNet18(zero_init_residual=zero).build(SHAPE, 10)
    assert [bool(block.branch[-1].weight.any()) for block in model.blocks] == [not zero] * 8
    assert all(block.branch[1].weight.all() for block in model.blocks)


@pytest.mark.slow
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
