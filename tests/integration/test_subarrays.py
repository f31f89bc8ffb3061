"""Groups of fused learners on streams: what serial gives, in whatever order the streams go on."""

from __future__ import annotations

import math

import pytest

from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.base import even_groups
from crossbow_py.engine.executors.streams import FourSubArrays, TwoSubArrays
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.update.optimizers import SGD, AdamW
from tests.integration.test_kernel_rounds import images, residual
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import features, make_tasks, norm_model, norm_with_dropout
from tests.unit.engine.executors.test_fused_device import assert_equal, run

pytestmark = pytest.mark.slow


def tasks_for(make_model=norm_model, num_learners=3, **options):
    data = options.pop("data", features(48, (3, 6, 6)))
    return make_tasks(make_model, num_learners=num_learners, data=data, order="blocks", **options)


def test_groups_are_neighbours_as_even_as_they_go():
    assert even_groups(7, 4) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert even_groups(8, 2) == [range(4), range(4, 8)]
    assert even_groups(1, 4) == [range(1)]


@pytest.mark.parametrize("optimizer", [SGD(momentum=(0.5, 0.9, 0.3)), AdamW(clip_norm=1.0)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("rule", [SMA(), SMA(averaging_period=2)], ids=["every", "second"])
def test_two_groups_of_three_learners_in_float64_equal_serial(rule, optimizer):
    ours, reference = (tasks_for(rule=rule, optimizer=optimizer) for _ in range(2))
    found = run(TwoSubArrays(ours, RecordingStreams()), ours, 4)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4))


def test_four_groups_of_five_learners_equal_serial_and_are_four_graphs_of_learning():
    ours, reference = (tasks_for(residual, num_learners=5, data=images(40)) for _ in range(2))
    device = RecordingStreams()
    found = run(FourSubArrays(ours, device), ours, 4)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4))
    captured = [entry.split()[2] for entry in device.log if "capture" in entry]
    assert sorted(captured) == sorted(
        [*(f"learning({j})" for j in range(4)), *(f"correction({j})" for j in range(4)), "averaging"]
    )


@pytest.mark.parametrize("seed", range(2))
def test_groups_in_any_order_that_streams_allow_equal_serial(seed):
    ours, reference = (tasks_for() for _ in range(2))
    found = run(TwoSubArrays(ours, ShuffledStreams(seed)), ours, 4)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4))


def test_dropout_draws_what_the_same_learners_draw_in_serial():
    ours, reference = (tasks_for(norm_with_dropout) for _ in range(2))
    found = run(TwoSubArrays(ours, RecordingStreams()), ours, 4)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4))


def test_independent_learners_share_their_batch_within_groups():
    ours, reference = (tasks_for(rule=Independent()) for _ in range(2))
    found = run(TwoSubArrays(ours, RecordingStreams()), ours, 4, shared=True)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4, shared=True))


def test_correction_norm_is_that_of_all_groups():
    ours, reference = (tasks_for() for _ in range(2))
    run(TwoSubArrays(ours, RecordingStreams()), ours, 3)
    run(SerialExecutor(reference), reference, 3)
    assert math.isclose(ours.bank.correction_norm(), reference.bank.correction_norm(), rel_tol=1e-9)


def test_groups_without_update_kernels_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("crossbow_py.engine.update.kernel_update.unavailable", lambda device: "Triton is not installed")
    with pytest.raises(UserError, match="executor=subarrays2 needs the update kernels.*Triton is not installed"):
        TwoSubArrays(tasks_for(precision=FP32), RecordingStreams())
