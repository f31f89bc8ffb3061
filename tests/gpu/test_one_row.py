"""Learners that stay equal, in one row on a GPU: what `serial` gives with a row each, in graphs and eagerly."""

from __future__ import annotations

import math

import pytest
import torch

from crossbow_py.averaging import SynchronousSGD
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon
from tests.gpu.support import Counting, Eager, HAS_KERNELS, slow_if_simulated, tasks_on_cuda
from tests.support import assert_equal, assert_learners_equal, norm_with_dropout, plan, poison, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]


def pair(**options):
    """Tasks of learners in one row, and of learners with a row each."""
    options = {"make_model": norm_with_dropout, "rule": SynchronousSGD(), **options}
    return [tasks_on_cuda(one_row=one_row, **options) for one_row in (True, False)]


def assert_as_a_row_each(num_rounds=5, kind=Counting, **options):
    """Rounds of `fused` with one row are those of `serial`. Returns the device, and the outcomes of both."""
    ours, reference = pair(**options)
    device = kind(ours.bank.device)
    found, expected = run(FusedExecutor(ours, device), ours, num_rounds), run(SerialExecutor(reference), reference, num_rounds)
    assert_equal(ours.bank, reference.bank, found, expected)
    return device, found, expected


@pytest.mark.parametrize("kind", [Counting, Eager], ids=["graphs", "eager"])
@pytest.mark.parametrize("optimizer", [SGD(nesterov=True, clip_norm=0.3, weight_decay=1e-3), AdamW(clip_norm=0.3)], ids=["sgd", "adamw"])
def test_one_row_trains_as_learners_with_a_row_each(optimizer, kind):
    device, *_ = assert_as_a_row_each(optimizer=optimizer, kind=kind)
    if kind is Counting:
        assert (device.captured, device.num_replays) == (["round"], 5 - WARM_UP_ROUNDS)


def test_gradients_are_compared_in_graphs_of_their_own():
    device, found, expected = assert_as_a_row_each(18, compares=True)
    assert device.captured == ["round", "round"]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.comparison == (theirs.comparison and pytest.approx(theirs.comparison, rel=1e-8))
    assert found[8].comparison is not None
