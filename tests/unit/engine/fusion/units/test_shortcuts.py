"""Shortcuts without parameters run as one step, where they are ones; what looks like them is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from tests.support import assert_learners_equal, features, make_tasks, run


class Shortcut(nn.Module):
    """Images of any number of dimensions, every second place of two of them, padded last."""

    def __init__(self, convolution, strides=(2, 3), widths=(1, 2)):
        super().__init__()
        self.conv, self.strides, self.widths = convolution(2, 4, 1), strides, widths
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        x = self.conv(x)
        x = functional.pad(x[:, :, :: self.strides[0]][:, :, :, :: self.strides[1]], (0, 0, 0, 0, *self.widths))
        return self.head(x.flatten(1))


def model(convolution, shape, **options):
    def make():
        torch.manual_seed(2)
        made = Shortcut(convolution, **options).double()
        made(torch.zeros(1, *shape, dtype=torch.float64))
        return made.float()

    return make


@pytest.mark.parametrize(
    ("convolution", "shape", "options", "steps"),
    [
        (nn.Conv2d, (2, 5, 7), {}, 1),
        (nn.Conv2d, (2, 6, 6), {"widths": (0, 3)}, 1),
        (nn.Conv2d, (2, 6, 6), {"widths": (-1, 3)}, 0),
        (nn.Conv3d, (2, 4, 5, 3), {"strides": (2, 2)}, 0),  # pads depth and not channels
    ],
)
def test_shortcut_of_three_learners_equals_serial(convolution, shape, options, steps):
    tasks, reference = (
        make_tasks(model(convolution, shape, **options), num_learners=3, data=features(24, shape, 3), order="blocks")
        for _ in range(2)
    )
    runner = FusedExecutor(tasks)
    assert sum(bool(step.together) for step in runner._pass.graph.steps) == steps
    run(runner, tasks, 3)
    run(SerialExecutor(reference), reference, 3)
    assert_learners_equal(tasks.bank, reference.bank)
