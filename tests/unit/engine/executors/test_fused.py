"""Fused rounds on CPU over several devices: averaging beside the learning of the rounds after it."""

from __future__ import annotations

import threading

import pytest
import torch

from crossbow_py.averaging import Crossbow
from crossbow_py.core.errors import LearnerError, RankLostError
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.modules.precision import FP32, FP64
from crossbow_py.telemetry.timeline import Timeline
from tests.support import assert_learners_equal, make_tasks, plan, run, run_rounds

# In float32 native code does all corrections in one pass.
PRECISIONS = pytest.mark.parametrize(("precision", "tolerance"), [(FP64, 1e-8), (FP32, 1e-5)], ids=["fp64", "fp32"])


class SlowSum(Collective):
    """Two devices, of which the other adds nothing, and the first sum waits to be let go."""

    num_devices = 2

    def __init__(self, failure=None):
        self.let_go, self._failure = threading.Event(), failure

    def all_reduce_sum(self, values):
        assert self.let_go.wait(10), "nobody let the sum end"
        if self._failure is not None:
            raise self._failure


def tasks_of_two_devices(collective, **options):
    tasks = make_tasks(num_learners=3, order="blocks", **options)
    tasks.collective = collective
    return tasks


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("crossbow averaging")]


@PRECISIONS
def test_next_round_learns_while_a_slow_sum_is_under_way_and_corrects_after_it(precision, tolerance):
    collective = SlowSum()
    tasks = tasks_of_two_devices(collective, precision=precision)
    runner, batches = FusedExecutor(tasks), tasks.feed.batches

    def let_go_in_round_1(starts):
        if starts == plan(tasks, 1).starts:
            collective.let_go.set()
        return batches(starts)

    tasks.feed.batches = let_go_in_round_1
    run(runner, tasks, 6, rate=lambda n: 0.1)
    assert threads() == []
    reference = make_tasks(num_learners=3, order="blocks", precision=precision)
    run_rounds(reference, "serial", 6)
    assert_learners_equal(tasks.bank, reference.bank, tolerance)


@PRECISIONS
def test_with_a_period_rounds_go_on_until_the_next_that_averages(precision, tolerance):
    collective, rule = SlowSum(), Crossbow(averaging_period=3)
    tasks = tasks_of_two_devices(collective, rule=rule, precision=precision)
    runner, z = FusedExecutor(tasks), tasks.bank.z.storage.clone()
    seen = [outcome.plan.index for n in range(5) for outcome in runner.submit(plan(tasks, n))]
    assert seen == [0, 1, 2, 3]  # round 2's average still waits
    assert torch.equal(tasks.bank.z.storage, z)
    collective.let_go.set()
    runner.settle()
    assert not torch.equal(tasks.bank.z.storage, z)
    assert [outcome.plan.index for outcome in runner.submit(plan(tasks, 5)) + runner.drain()] == [4, 5]
    runner.close()
    reference = make_tasks(num_learners=3, order="blocks", rule=rule, precision=precision)
    run_rounds(reference, "serial", 6)
    assert_learners_equal(tasks.bank, reference.bank, tolerance)


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (RankLostError(), RankLostError, None),
        (ValueError("boom"), LearnerError, "averaging failed in round 0 on averaging: ValueError: boom"),
    ],
    ids=["lost", "broken"],
)
@pytest.mark.parametrize("then", ["submit", "drain"])
def test_sum_that_fails_raises_where_it_is_waited_for_and_leaves_no_thread(failure, kind, said, then):
    collective = SlowSum(failure)
    tasks = tasks_of_two_devices(collective)
    runner = FusedExecutor(tasks)
    runner.submit(plan(tasks, 0))
    collective.let_go.set()
    runner.settle()
    with pytest.raises(kind, match=said):
        if then == "submit":
            runner.submit(plan(tasks, 1))
        else:
            runner.drain()
    runner.close()
    assert threads() == []


def test_sum_that_fails_is_known_to_rounds_that_do_not_average():
    collective = SlowSum(RankLostError())
    tasks = tasks_of_two_devices(collective, rule=Crossbow(averaging_period=2))
    runner = FusedExecutor(tasks)
    collective.let_go.set()
    runner.submit(plan(tasks, 0))
    with pytest.raises(RankLostError):  # at once, or by the time of the next round
        for n in (1, 2):
            runner.submit(plan(tasks, n))
            runner.settle()
    runner.close()


def test_close_lets_a_sum_end_that_others_wait_for():
    collective = SlowSum()
    tasks = tasks_of_two_devices(collective, rule=Crossbow(averaging_period=2))
    runner, z = FusedExecutor(tasks), tasks.bank.z.storage.clone()
    for n in range(2):
        runner.submit(plan(tasks, n))
    collective.let_go.set()
    runner.close()
    assert not torch.equal(tasks.bank.z.storage, z)
    assert (runner.running, threads()) == ({}, [])


def test_one_device_averages_in_the_callers_thread():
    tasks = make_tasks(order="blocks")
    runner, names = FusedExecutor(tasks), set()
    move = tasks.update.move
    tasks.update.move = lambda *arguments: (names.add(threading.current_thread().name), move(*arguments))
    runner.submit(plan(tasks, 0))
    assert (names, threads()) == ({"MainThread"}, [])
    runner.close()


def test_trace_shows_averaging_on_a_row_of_its_own():
    collective, timeline = SlowSum(), Timeline()
    collective.let_go.set()
    tasks = tasks_of_two_devices(collective)
    runner = FusedExecutor(tasks)
    runner.trace(timeline)
    run(runner, tasks, 2)
    found = sorted((span.args["round"], span.name, span.row) for span in timeline._spans)
    round_of = [("averaging", "averaging"), ("pass", "all learners"), ("update", "all learners")]
    assert found == [(n, *each) for n in range(2) for each in round_of]
