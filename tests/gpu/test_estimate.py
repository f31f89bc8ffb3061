"""The estimate by real rounds: what is recommended runs, and memory beyond the limit is never taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.cli.configuration import compose
from crossbow_py.engine.sizing.memory import Sample
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.estimate.estimation import estimate, reserved_bytes, within
from crossbow_py.train.run_settings import RunSettings
from tests.gpu.support import IS_SIMULATED, slow_if_simulated

pytestmark = pytest.mark.gpu

GIB = 2**30
DEVICE = torch.device("cuda", 0)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


def reserved(batch_size: int, executor: str = "fused") -> int | None:
    settings = RunSettings(batch_size=batch_size, num_learners=2, executor=executor, device="cuda")  # type: ignore[arg-type]
    return reserved_bytes(network, Sample((3, 32, 32), torch.bfloat16), 10, settings, SGD(), SMA())


@slow_if_simulated
@pytest.mark.parametrize("executor", ["serial", "fused", "streams"])
def test_rounds_take_more_with_larger_batches(executor: str) -> None:
    small, large = reserved(16, executor), reserved(512, executor)
    assert small is not None and large is not None
    assert large - small > 2 * 496 * 32 * 32 * 64 * 2  # one activation of bf16 a learner, at least


@slow_if_simulated
def test_rounds_beyond_the_limit_run_out_of_memory_and_leave_the_device_usable() -> None:
    with within(GIB // 2, DEVICE):
        assert reserved(16_384) is None
        assert reserved(16) is not None
    assert reserved(64) is not None


@slow_if_simulated
@pytest.mark.timeout(300)
def test_estimate_of_this_gpu_is_confirmed_by_rounds() -> None:
    free, _ = torch.cuda.mem_get_info()
    limit, model, data = (3 * GIB // 16, "mlp", "mnist") if IS_SIMULATED else (3 * GIB, "resnet20", "cifar10")
    overrides = [f"model={model}", f"data={data}", "num_learners=2", "device=cuda", f"held_back={free - limit}"]
    found = estimate(compose(overrides, EstimateConfig))
    assert found.measured is not None and found.recommendation is not None
    points = dict(found.measured.points)
    taken = points[found.recommendation.batch_size]
    assert taken is not None and taken <= limit
