"""A rank whose learners do not fit in memory: it takes part in every sum, adds nothing, and its z stays equal."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch import nn

from crossbow_py import SGD
from crossbow_py.averaging import Crossbow, DiLoCo, LocalSGD, SynchronousSGD
from crossbow_py.core.errors import LearnerError
from crossbow_py.distributed.collective import Collective
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.evaluation.current_models import final_states
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.loop.training_loop import TrainingLoop
from crossbow_py.train.run_folder.reporter import Reporter, run_info
from crossbow_py.train.run_settings import StopConditions
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
def make_loop():
    """Return (loop, its run, collective, loss) of two learners that the auto-tuner has grown."""
    made = []

    def make(executor="serial", tuned=True, alone=False, **options):
        loss, collective = Loss(), Collective() if alone else TwoDevices()
        number = {"num_learners": "auto", "max_learners": 4} if tuned else {"num_learners": 2}
        trainer = make_trainer(
            executor=executor, loss=loss, train_data=blobs(400), optimizer=SGD(learning_rate=0.01), **number, **options
        )
        run = trainer.run
        run = dataclasses.replace(run, collective=collective)
        if not alone:
            collective.bank, run.bank.num_devices = run.bank, 2
        reporter = Reporter([], ThroughputMeter())
        reporter.start(run_info(run, None), 0.0)
        loop = TrainingLoop(run, StopConditions(max_rounds=99), reporter, lambda own: [own], set())
        made.append(loop)
        if tuned:
            run.tuning.state = dataclasses.replace(run.tuning.state, num_learners=2)
            loop.learners.resize(2)
        return loop, run, collective, loss

    yield make
    for loop in made:
        loop.learners.close()


def submit(loop, run, rounds):
    return [loop.step(plan_round(run, index, index * 8, 1.0)) for index in rounds]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("healthy", [0, 3, 12])
def test_rank_out_of_memory_takes_part_in_every_sum_and_adds_nothing(make_loop, executor, healthy):
    loop, run, collective, loss = make_loop(executor)
    assert submit(loop, run, range(healthy)) == [True] * healthy
    loop.learners.settle()
    loss.error = MemoryError("no room")
    assert submit(loop, run, range(healthy, healthy + 4)) == [True] * 4
    assert loop.learners.memory.sits_out
    assert collective.num_sums == healthy + 4
    assert all(not given.any() for given in collective.given[healthy:])
    assert all(given.any() for given in collective.given[1:healthy])  # in the first round all learners are z


@pytest.mark.parametrize("executor", EXECUTORS)
def test_z_of_a_rank_that_sits_out_moves_by_what_the_others_add(make_loop, executor):
    loop, run, _, loss = make_loop(executor, averaging=Crossbow(correction_rate=None, averaging_momentum=0.5))
    bank = run.bank
    before = bank.z.flat()[0].clone()
    loss.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    submit(loop, run, range(3))
    assert not loop.learners.drain()
    # z − z_prev: 0; steps of 0.25, 0.25 + 0.125, 0.25 + 0.1875.
    torch.testing.assert_close(bank.z.flat()[0], before + 0.25 + 0.375 + 0.4375)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_learners_that_share_gradients_wait_for_another_ranks_weights_while_theirs_sits_out(make_loop, executor):
    loop, run, collective, loss = make_loop(executor, averaging=SynchronousSGD())
    bank = run.bank
    before = bank.weights.flat()[0].clone()
    loss.error = MemoryError("no room")
    assert submit(loop, run, range(3)) == [True] * 3
    assert collective.num_sums == 3
    assert all(not given.any() for given in collective.given)
    assert torch.equal(bank.weights.flat()[0], before)


def test_learners_that_share_gradients_are_alike_again_after_one_ran_out_of_memory_in_its_step(make_loop):
    loop, run, _, _ = make_loop("serial", alone=True, averaging=SynchronousSGD())
    run.tuning.state = dataclasses.replace(run.tuning.state, num_learners=4)
    loop.learners.resize(4)
    correct, calls = loop.learners.executor.tasks.correct, []

    def fails(learner, outcome):
        calls.append(learner)
        if learner == 2:
            raise MemoryError("no room")
        correct(learner, outcome)

    loop.learners.executor.tasks.correct = fails
    assert submit(loop, run, [0]) == [False]
    assert calls == [0, 1, 2]
    loop.learners.shrink()
    bank = run.bank
    rows = [bank.weights.flat(learner)[0] for learner in range(bank.num_learners)]
    assert bank.num_learners > 1 and all(torch.equal(row, rows[0]) for row in rows)
    assert torch.equal(bank.z.flat()[0], rows[0]) and set(bank.step_counts[: bank.num_learners]) == {1}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_that_sits_out_does_so_in_the_rounds_that_average_alone(make_loop, executor):
    loop, run, collective, loss = make_loop(executor, averaging=Crossbow(averaging_period=3))
    submit(loop, run, range(4))
    loop.learners.settle()
    assert collective.num_sums == 1
    loss.error = MemoryError("no room")
    submit(loop, run, range(4, 9))
    assert collective.num_sums == 3


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_out_of_memory_goes_on_with_fewer_learners_after_all_have_met(make_loop, executor):
    loop, run, collective, loss = make_loop(executor)
    submit(loop, run, range(2))
    loop.learners.settle()
    loss.error = MemoryError("no room")
    submit(loop, run, range(2, 4))
    loss.error = None
    loop.learners.shrink()
    assert not loop.learners.memory.sits_out
    assert (run.bank.num_learners, run.tuning.state.num_learners) == (1, 1)
    assert run.tuning.state.out_of_memory_at == 2
    assert submit(loop, run, range(4, 7)) == [True] * 3
    assert loop.learners.drain()
    assert collective.num_sums == 7
    assert collective.given[-1].any()


def test_rank_that_is_healthy_shrinks_too_when_another_is_out_of_memory(make_loop):
    loop, run, collective, _ = make_loop("threads")
    submit(loop, run, range(3))
    loop.learners.shrink()
    assert run.bank.num_learners == 1
    assert submit(loop, run, range(3, 5)) == [True] * 2
    assert loop.learners.drain()
    assert collective.num_sums == 5


@pytest.mark.parametrize("executor", EXECUTORS)
def test_losses_of_rounds_before_the_one_that_failed_count(make_loop, executor):
    loop, run, _, loss = make_loop(executor)
    submit(loop, run, range(3))
    loop.learners.settle()
    assert loop.learners.drain()
    counted = run.state.num_losses
    assert counted == 6
    loss.error = MemoryError("no room")
    submit(loop, run, range(3, 6))
    loop.learners.drain()
    assert run.state.num_losses == counted


def test_memory_of_the_failed_round_is_free_before_the_rank_takes_part_in_sums(make_loop):
    loop, run, collective, _ = make_loop("serial")
    kept: list[weakref.ref[torch.Tensor]] = []
    summed, alive = collective.all_reduce_sum, []

    def fails(outputs, targets):
        activations = outputs * 2
        kept.append(weakref.ref(activations))
        raise MemoryError("no room")

    def watched(values):
        alive.append(kept[0]() is not None)
        summed(values)

    loop.learners.executor.tasks.loss, collective.all_reduce_sum = fails, watched
    assert submit(loop, run, range(1)) == [True]
    assert alive == [False]


@pytest.mark.parametrize("error", [RuntimeError("another mistake"), ValueError("no")])
def test_other_errors_than_of_memory_are_raised(make_loop, error):
    loop, run, _, loss = make_loop()
    loss.error = error
    with pytest.raises(LearnerError, match=type(error).__name__):
        submit(loop, run, range(2))
    assert not loop.learners.memory.sits_out


def test_out_of_memory_with_a_fixed_number_of_learners_is_raised(make_loop):
    loop, run, _, loss = make_loop(tuned=False)
    loss.error = MemoryError("no room")
    with pytest.raises(LearnerError, match="MemoryError: no room"):
        submit(loop, run, range(2))


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("after", [1, 3])
def test_learners_that_go_by_themselves_lose_nothing_of_it_when_some_come_or_go(make_loop, rule, after):
    loop, run, _, _ = make_loop(alone=True, averaging=rule(averaging_period=1000))
    submit(loop, run, range(5))
    assert loop.learners.drain()
    bank = run.bank
    rows = [bank.weights.flat(learner)[0].clone() for learner in range(2)]
    z, mean = bank.z.flat()[0].clone(), (rows[0] + rows[1]) / 2
    loop.learners.resize(after)
    torch.testing.assert_close(bank.z.flat()[0], mean)
    assert not torch.allclose(mean, z)
    found = [bank.weights.flat(learner)[0] for learner in range(after)]
    torch.testing.assert_close(found[-1], mean)
    if after > 1:
        assert all(torch.equal(own, before) for own, before in zip(found, rows, strict=False))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_that_runs_out_of_memory_after_a_look_at_the_learners_mean_takes_part_in_every_sum(make_loop, executor):
    loop, run, collective, loss = make_loop(executor, averaging=LocalSGD(averaging_period=2))
    begun = collective.num_sums
    submit(loop, run, range(3))
    assert loop.learners.drain()
    final_states(run)
    assert collective.num_sums == begun + 2  # an outer step, and the look
    loss.error = MemoryError("no room")
    assert submit(loop, run, range(3, 8)) == [True] * 5
    assert loop.learners.memory.sits_out
    assert collective.num_sums == begun + 2 + 3
