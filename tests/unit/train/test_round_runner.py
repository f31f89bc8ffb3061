"""A rank whose learners do not fit in memory: it takes part in every sum, adds nothing, and its z stays equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from crossbow_py import SGD, Crossbow, DiLoCo, LocalSGD, SynchronousSGD
from crossbow_py.core.errors import LearnerError
from crossbow_py.distributed.collective import Collective
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.round_runner import RoundRunner
from crossbow_py.train.run_folder.reporter import Reporter, run_info
from tests.trainers import blobs, make_trainer

EXECUTORS = ["serial", "threads", "fused"]
OTHERS = 0.25  # what the other device adds to every sum


class TwoDevices(Collective):
    """A collective with a second, pretended device; it records what this one's bank contributed."""

    num_devices = 2

    def __init__(self) -> None:
        self.num_sums, self.given, self.bank = 0, [], None

    def all_reduce_sum(self, values: torch.Tensor) -> None:
        self.num_sums += 1
        own = self.bank.total.flat()
        self.given.append(torch.cat(own))
        torch._foreach_add_(own, OTHERS)  # and nothing to the padding between them, which is always zero


class Loss:
    """Cross-entropy that raises a memory error when told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return nn.functional.cross_entropy(outputs, targets)


@pytest.fixture
def make_runner():
    """Return (runner, its run, collective, loss) of two learners that the auto-tuner has grown."""
    made = []

    def make(executor="serial", tuned=True, **options):
        loss, collective = Loss(), TwoDevices()
        number = {"num_learners": "auto", "max_learners": 4} if tuned else {"num_learners": 2}
        trainer = make_trainer(
            executor=executor, loss=loss, train_data=blobs(400), optimizer=SGD(learning_rate=0.01), **number, **options
        )
        run = trainer.run
        run = dataclasses.replace(run, collective=collective)
        collective.bank, run.bank.num_devices = run.bank, 2
        reporter = Reporter([], ThroughputMeter())
        reporter.start(run_info(run, None), 0.0)
        runner = RoundRunner(run, reporter)
        made.append(runner)
        if tuned:
            run.tuning.state = dataclasses.replace(run.tuning.state, num_learners=2)
            runner.set_learners(2)
        return runner, run, collective, loss

    yield make
    for runner in made:
        runner.close()


def submit(runner, run, rounds):
    return [runner.submit(run.plan(index, index * 8, 1.0)) for index in rounds]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("healthy", [0, 3, 12])
def test_rank_out_of_memory_takes_part_in_every_sum_and_adds_nothing(make_runner, executor, healthy):
    runner, run, collective, loss = make_runner(executor)
    assert submit(runner, run, range(healthy)) == [True] * healthy
    runner.settle()
    loss.error = MemoryError("no room")
    assert submit(runner, run, range(healthy, healthy + 4)) == [True] * 4
    assert runner.out_of_memory
    assert collective.num_sums == healthy + 4
    assert all(not given.any() for given in collective.given[healthy:])
    assert all(given.any() for given in collective.given[1:healthy])  # in the first round all learners are z


@pytest.mark.parametrize("executor", EXECUTORS)
def test_z_of_a_rank_that_sits_out_moves_by_what_the_others_add(make_runner, executor):
    runner, run, _, loss = make_runner(executor, averaging=Crossbow(correction_rate=None, averaging_momentum=0.5))
    bank = run.bank
    before = bank.z.flat()[0].clone()
    loss.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    submit(runner, run, range(3))
    assert not runner.drain()
    # z − z_prev: 0; steps of 0.25, 0.25 + 0.125, 0.25 + 0.1875.
    torch.testing.assert_close(bank.z.flat()[0], before + 0.25 + 0.375 + 0.4375)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_learners_that_share_gradients_wait_for_another_ranks_weights_while_theirs_sits_out(make_runner, executor):
    runner, run, collective, loss = make_runner(executor, averaging=SynchronousSGD())
    bank = run.bank
    before = bank.weights.flat()[0].clone()
    loss.error = MemoryError("no room")
    assert submit(runner, run, range(3)) == [True] * 3
    assert collective.num_sums == 3
    assert all(not given.any() for given in collective.given)
    assert torch.equal(bank.weights.flat()[0], before)


def test_learners_that_share_gradients_are_alike_again_after_one_ran_out_of_memory_in_its_step(make_runner):
    runner, run, _, _ = make_runner("serial", averaging=SynchronousSGD())
    runner._run = run = dataclasses.replace(run, collective=Collective())
    run.bank.num_devices = 1
    run.tuning.state = dataclasses.replace(run.tuning.state, num_learners=4)
    runner.set_learners(4)
    correct, calls = runner.executor.tasks.correct, []

    def fails(learner, outcome):
        calls.append(learner)
        if learner == 2:
            raise MemoryError("no room")
        correct(learner, outcome)

    runner.executor.tasks.correct = fails
    assert submit(runner, run, [0]) == [False]
    assert calls == [0, 1, 2]
    runner.shrink()
    bank = run.bank
    rows = [bank.weights.flat(learner)[0] for learner in range(bank.num_learners)]
    assert bank.num_learners > 1 and all(torch.equal(row, rows[0]) for row in rows)
    assert torch.equal(bank.z.flat()[0], rows[0]) and set(bank.step_counts[: bank.num_learners]) == {1}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_that_sits_out_does_so_in_the_rounds_that_average_alone(make_runner, executor):
    runner, run, collective, loss = make_runner(executor, averaging=Crossbow(averaging_period=3))
    submit(runner, run, range(4))
    runner.settle()
    assert collective.num_sums == 1
    loss.error = MemoryError("no room")
    submit(runner, run, range(4, 9))
    assert collective.num_sums == 3


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_out_of_memory_goes_on_with_fewer_learners_after_all_have_met(make_runner, executor):
    runner, run, collective, loss = make_runner(executor)
    submit(runner, run, range(2))
    runner.settle()
    loss.error = MemoryError("no room")
    submit(runner, run, range(2, 4))
    loss.error = None
    runner.shrink()
    assert not runner.out_of_memory
    assert (run.bank.num_learners, run.tuning.state.num_learners) == (1, 1)
    assert run.tuning.state.out_of_memory_at == 2
    assert submit(runner, run, range(4, 7)) == [True] * 3
    assert runner.drain()
    assert collective.num_sums == 7
    assert collective.given[-1].any()


def test_rank_that_is_healthy_shrinks_too_when_another_is_out_of_memory(make_runner):
    runner, run, collective, _ = make_runner("threads")
    submit(runner, run, range(3))
    runner.shrink()
    assert run.bank.num_learners == 1
    assert submit(runner, run, range(3, 5)) == [True] * 2
    assert runner.drain()
    assert collective.num_sums == 5


@pytest.mark.parametrize("executor", EXECUTORS)
def test_losses_of_rounds_before_the_one_that_failed_count(make_runner, executor):
    runner, run, _, loss = make_runner(executor)
    submit(runner, run, range(3))
    runner.settle()
    assert runner.drain()
    counted = run.state.num_losses
    assert counted == 6
    loss.error = MemoryError("no room")
    submit(runner, run, range(3, 6))
    runner.drain()
    assert run.state.num_losses == counted


@pytest.mark.parametrize("error", [RuntimeError("another mistake"), ValueError("no")])
def test_other_errors_than_of_memory_are_raised(make_runner, error):
    runner, run, _, loss = make_runner()
    loss.error = error
    with pytest.raises(LearnerError, match=type(error).__name__):
        submit(runner, run, range(2))
    assert not runner.out_of_memory


def test_out_of_memory_with_a_fixed_number_of_learners_is_raised(make_runner):
    runner, run, _, loss = make_runner(tuned=False)
    loss.error = MemoryError("no room")
    with pytest.raises(LearnerError, match="MemoryError: no room"):
        submit(runner, run, range(2))


@pytest.fixture
def make_lonely_runner(make_runner):
    """Return what `make_runner` does, on a single device."""

    def make(**options):
        runner, run, _, _ = make_runner(**options)
        runner._run = run = dataclasses.replace(run, collective=Collective())
        run.bank.num_devices = 1
        run.tuning.state = dataclasses.replace(run.tuning.state, num_learners=2)
        return runner, run

    return make


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("after", [1, 3])
def test_learners_that_go_by_themselves_lose_nothing_of_it_when_some_come_or_go(make_lonely_runner, rule, after):
    runner, run = make_lonely_runner(averaging=rule(averaging_period=1000))
    submit(runner, run, range(5))
    assert runner.drain()
    bank = run.bank
    rows = [bank.weights.flat(learner)[0].clone() for learner in range(2)]
    z, mean = bank.z.flat()[0].clone(), (rows[0] + rows[1]) / 2
    runner.set_learners(after)
    torch.testing.assert_close(bank.z.flat()[0], mean)
    assert not torch.allclose(mean, z)
    found = [bank.weights.flat(learner)[0] for learner in range(after)]
    torch.testing.assert_close(found[-1], mean)
    if after > 1:
        assert all(torch.equal(own, before) for own, before in zip(found, rows, strict=False))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_that_runs_out_of_memory_after_a_look_at_the_learners_mean_takes_part_in_every_sum(make_runner, executor):
    runner, run, collective, loss = make_runner(executor, averaging=LocalSGD(averaging_period=2))
    begun = collective.num_sums
    submit(runner, run, range(3))
    assert runner.drain()
    run.final_states(0)
    assert collective.num_sums == begun + 2  # an outer step, and the look
    loss.error = MemoryError("no room")
    assert submit(runner, run, range(3, 8)) == [True] * 5
    assert runner.out_of_memory
    assert collective.num_sums == begun + 2 + 3
