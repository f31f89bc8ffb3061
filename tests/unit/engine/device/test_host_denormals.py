"""Numbers next to zero are zero while training, in every thread that trains, and not in the user's own work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.engine.device.host import flushed_denormals, flushes_denormals
from tests.trainers import make_trainer

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor has no such mode")


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_denormals_are_flushed_until_the_outermost_end_whatever_the_default_format_is(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert not flushes_denormals()
        with flushed_denormals():
            assert flushes_denormals()
            with flushed_denormals():
                assert flushes_denormals()
            assert flushes_denormals()
        assert not flushes_denormals()
    finally:
        torch.set_default_dtype(before)


def test_denormals_are_looked_for_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):  # which holds no values
        assert not flushes_denormals()


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_training_flushes_denormals_in_its_threads_and_leaves_the_callers_as_it_was(executor: str) -> None:
    seen: list[bool] = []

    class Looking(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                seen.append(flushes_denormals())
            return super().forward(inputs)

    trainer = make_trainer(model=lambda: Looking(4, 3), executor=executor, num_learners=2)
    before = len(seen)
    trainer.fit(max_rounds=2)
    assert seen[before:] == [True] * 4
    assert not flushes_denormals()
