"""Gradients averaged over groups of learners: on every executor and device, with learners that fail, come and go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.averaging import GradientMean, GroupedSMA, SynchronousSGD
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors import EXECUTORS, SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import FP32, FP64
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, Scheduler
from crossbow_py.engine.tasks import AveragingTask, CorrectionTask, GradientMeanTask, LearningTask
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.engine.update.row_update import NativeUpdate
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import assert_equal, features, linear_model, make_tasks, norm_model, plan, run
from tests.thinned import pairs

IMAGES = features(48, (3, 6, 6))
RULES = [SynchronousSGD(), GroupedSMA(group_size=2)]
KEYS = ["everybody", "pairs"]


def tasks_for(rule, make_model=norm_model, num_learners=3, order="blocks", **options):
    return make_tasks(make_model, num_learners=num_learners, rule=rule, order=order, data=IMAGES, **options)


def rows(bank):
    return torch.stack([torch.cat(bank.weights.trained(j)) for j in range(bank.num_learners)])


@pytest.mark.parametrize(
    ("size", "num_learners", "groups"),
    [
        (None, 3, [range(3)]),
        (1, 2, [range(1), range(1, 2)]),
        (2, 3, [range(1), range(1, 3)]),
        (4, 6, [range(3), range(3, 6)]),
        (4, 4, [range(4)]),
        (4, 1, [range(1)]),
    ],
)
def test_groups_are_as_few_as_there_may_be_and_as_even_as_they_go(size, num_learners, groups):
    assert GradientMean(size).groups(num_learners) == groups


@pytest.mark.parametrize(
    ("size", "num_learners", "num_devices", "groups"),
    [(None, 1, 1, 1), (None, 1, 2, 1), (4, 4, 2, 2), (1, 2, 2, 4), (2, 1, 2, 2)],
)
def test_groups_end_at_devices_unless_they_are_everybody(size, num_learners, num_devices, groups):
    mean = GradientMean(size)
    assert mean.num_groups(num_learners, num_devices) == groups
    assert mean.has_effect(num_learners, num_devices) is (groups < num_learners * num_devices)


def test_mean_is_that_of_the_group_alike_to_the_bit():
    bank = make_tasks(num_learners=3).bank
    for learner, value in enumerate((1.0, 2.0, 6.0)):
        for part in bank.gradients.trained(learner):
            part.fill_(value)
    bank.average_gradients(GradientMean(2), Collective())
    found = [torch.cat(bank.gradients.trained(j)) for j in range(3)]
    assert (found[0] == 1).all() and (found[1] == 4).all() and torch.equal(found[1], found[2])


def test_scheduler_puts_the_mean_between_all_learning_and_every_correction():
    scheduler = Scheduler(2, averages_gradients=True)
    scheduler.round(0, averages=True)
    mean, learning = GradientMeanTask(1), (LearningTask(0, 1), LearningTask(1, 1))
    corrections = (CorrectionTask(0, 1), CorrectionTask(1, 1))
    assert scheduler.round(1, averages=True) == (
        Launch(learning[0], "learner 0"),
        Launch(learning[1], "learner 1"),
        Launch(mean, AVERAGING_STREAM, learning),
        Launch(corrections[0], "learner 0", (mean, AveragingTask(0))),
        Launch(corrections[1], "learner 1", (mean, AveragingTask(0))),
        Launch(AveragingTask(1), AVERAGING_STREAM, corrections),
    )


@pytest.mark.parametrize("optimizer", [SGD(nesterov=True, clip_norm=0.3), AdamW(weight_decay=0.1)])
def test_learners_whose_gradients_are_averaged_are_one_with_their_batches_in_one(optimizer):
    tasks = make_tasks(num_learners=4, batch_size=4, rule=SynchronousSGD(), optimizer=optimizer)
    one = make_tasks(num_learners=1, batch_size=16, optimizer=optimizer)
    run(SerialExecutor(tasks), tasks, 12)
    run(SerialExecutor(one), one, 12)
    together, alone = rows(tasks.bank), rows(one.bank)
    assert torch.equal(together, together[:1].expand_as(together))
    assert (together[0] - alone[0]).norm() <= 1e-12 * alone[0].norm()


@pytest.mark.parametrize(
    ("executor", "rule", "optimizer"),
    pairs(["threads", "fused", "fused_threads"], RULES, [SGD(momentum=0.7), AdamW(clip_norm=0.5)], quick=3),
)
def test_executors_on_the_host_equal_serial(executor, rule, optimizer):
    ours, reference = (tasks_for(rule, optimizer=optimizer, order=order) for order in ("blocks", "rows"))
    found = run(EXECUTORS[executor](ours), ours, 6)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 6))


@pytest.mark.parametrize("optimizer", [SGD(nesterov=True, clip_norm=0.3), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("rule", RULES, ids=KEYS)
@pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])
def test_rounds_by_native_code_equal_those_by_operators_in_float64(executor, rule, optimizer):
    options = {"num_learners": 3, "rule": rule, "optimizer": optimizer, "order": EXECUTORS[executor].ORDER}
    ours, reference = make_tasks(**options, precision=FP32), make_tasks(**options)
    assert isinstance(ours.update, NativeUpdate)
    assert not isinstance(reference.update, NativeUpdate)
    run(EXECUTORS[executor](ours), ours, 6)
    run(SerialExecutor(reference), reference, 6)
    found, expected = rows(ours.bank).double(), rows(reference.bank)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert ours.bank.step_counts == reference.bank.step_counts


@pytest.mark.parametrize("rule", RULES, ids=KEYS)
@pytest.mark.parametrize("kind", [StreamsExecutor, FusedExecutor])
@pytest.mark.parametrize("make_device", [RecordingStreams, lambda: ShuffledStreams(1)], ids=["in order", "shuffled"])
def test_executors_on_a_device_equal_serial(kind, rule, make_device):
    ours, reference = (tasks_for(rule, optimizer=AdamW(clip_norm=0.5)) for _ in range(2))
    found = run(kind(ours, make_device()), ours, 4)  # the last by graphs
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 4))


class Poisoned(nn.Module):
    """Its loss is not finite for inputs above a limit."""

    def __init__(self):
        super().__init__()
        self.inner = linear_model()

    def forward(self, inputs):
        return self.inner(inputs) * torch.where(inputs > 1e6, math.nan, 1.0).amax(1, keepdim=True)


def poisoned(rule, num_learners=3, precision=FP64, non_finite=(1,), one_row=False):
    inputs, targets = (value.clone() for value in features(64))
    inputs[...] = inputs.clamp(-2, 2)
    options = {"num_learners": num_learners, "rule": rule, "order": "blocks", "precision": precision}
    tasks = make_tasks(Poisoned, data=(inputs, targets), one_row=one_row, **options)
    starts = plan(tasks, 1).starts
    batch = torch.cat([tasks.feed.batch(starts[learner]).inputs for learner in non_finite])  # in round 1
    for row in range(len(inputs)):
        if any(torch.equal(inputs[row].to(batch), own) for own in batch):
            inputs[row] = 1e9
    return make_tasks(Poisoned, data=(inputs, targets), **options)


BUILDS = {
    **{name: EXECUTORS[name] for name in ("serial", "threads", "fused", "fused_threads")},
    "streams": lambda tasks: StreamsExecutor(tasks, RecordingStreams()),
    "fused on a device": lambda tasks: FusedExecutor(tasks, RecordingStreams()),
}


@pytest.mark.parametrize(
    ("build", "one_row"), [*((own, False) for own in BUILDS.values()), (FusedExecutor, True)], ids=[*BUILDS, "one row"]
)
def test_learner_that_is_not_finite_adds_nothing_and_steps_with_the_others(build, one_row):
    tasks = poisoned(SynchronousSGD(), one_row=one_row)
    outcomes = run(build(tasks), tasks, 2)
    assert [o.finite for o in outcomes] == [[True] * 3, [True, False, True]]
    found = rows(tasks.bank)
    assert torch.isfinite(found).all() and torch.equal(found, found[:1].expand_as(found))
    assert tasks.bank.step_counts[:3] == [2, 2, 2]

    reference = poisoned(SynchronousSGD())
    run(SerialExecutor(reference), reference, 1)
    gradients = []
    for learner in (0, 2):
        batch = reference.feed.batch(plan(reference, 1).starts[learner])
        loss = nn.functional.cross_entropy(reference.model(learner)(batch.inputs), batch.targets)
        gradients.append(torch.autograd.grad(loss, reference.bank.trained_parameters(learner)))
    mean = torch.cat([(a + b).flatten() / 3 for a, b in zip(*gradients, strict=True)])
    velocity = 0.9 * torch.cat(reference.bank.state["momentum"].trained(0)) + mean
    expected = rows(reference.bank)[0] - 0.05 * velocity
    assert (found[0] - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("precision", [FP32, FP64], ids=["fp32", "fp64"])
def test_group_that_is_lost_as_a_whole_stays_where_it_was_and_pulls_nobody(build, precision):
    tasks = poisoned(GroupedSMA(group_size=2), num_learners=4, precision=precision, non_finite=(2, 3))
    runner = build(tasks)
    runner.submit(plan(tasks, 0))
    runner.drain()
    bank, before = tasks.bank, rows(tasks.bank)
    z = torch.cat(bank.z.trained()).clone()
    runner.submit(plan(tasks, 1))
    (outcome,) = runner.drain()
    runner.close()
    assert outcome.finite == [True, True, False, False]
    found = rows(bank)
    assert torch.equal(found[2:], before[2:]) and not torch.equal(found[0], before[0])
    assert bank.step_counts[:4] == [2, 2, 1, 1]
    moved = z + 0.5 * (found[0] - z)  # to the mean of one group and of z, in place of the other
    torch.testing.assert_close(torch.cat(bank.z.trained()), moved)


@pytest.mark.parametrize(
    ("before", "after", "from_group"),
    [
        (8, 6, [0, 1]),
        (6, 8, [0, 1]),
        (12, 10, [0, 1, 2]),
        (16, 12, [0, 1, 2]),
        (8, 12, [0, 1, None]),
        (8, 9, [0, 1, None]),
        (9, 8, [0, 1]),
    ],
)
def test_groups_go_on_with_their_own_weights_and_state_when_learners_come_or_go(before, after, from_group):
    bank = make_tasks(num_learners=before, rule=GroupedSMA(group_size=4)).bank
    for number, group in enumerate(bank.gradient_groups):
        for learner in group:
            for part in [*bank.weights.trained(learner), *bank.state["momentum"].trained(learner)]:
                part.fill_(number + 1.0)
    bank.z.storage.fill_(9.0)
    bank.resize(after)
    weights, momenta = (
        [float(each.trained(group[0])[0][0]) for group in bank.gradient_groups]
        for each in (bank.weights, bank.state["momentum"])
    )
    assert weights == [9.0 if number is None else number + 1.0 for number in from_group]
    assert momenta == [0.0 if number is None else number + 1.0 for number in from_group]


def test_learners_that_join_equal_replicas_have_the_others_weights_and_state():
    tasks = tasks_for(SynchronousSGD(), num_learners=2)
    run(SerialExecutor(tasks), tasks, 3)
    bank = tasks.bank
    bank.adopt_learner()
    bank.resize(4)
    found, state = rows(bank), bank.state["momentum"]
    assert torch.equal(found, found[:1].expand_as(found))
    assert all(torch.equal(a, b) for a, b in zip(state.trained(0), state.trained(3), strict=True))
    assert bank.step_counts[:4] == [3] * 4 and state.trained(0)[0].norm() > 0


def test_groups_that_shrink_to_one_are_equal_replicas_at_z():
    tasks = tasks_for(GroupedSMA(group_size=2), num_learners=4)
    run(SerialExecutor(tasks), tasks, 3)
    bank = tasks.bank
    assert not bank.replicas_identical
    z = torch.cat(bank.z.trained()).clone()
    bank.resize(2)
    assert bank.replicas_identical and torch.equal(rows(bank), torch.stack([z, z]))
    state = bank.state["momentum"]
    assert all(torch.equal(a, b) for a, b in zip(state.trained(0), state.trained(1), strict=True))


@pytest.mark.parametrize("num_learners", [3, 5, 6])
def test_learners_of_a_group_are_alike_whatever_group_they_were_in_before(num_learners):
    tasks = tasks_for(GroupedSMA(group_size=2), num_learners=4, optimizer=AdamW())
    run(SerialExecutor(tasks), tasks, 3)
    bank = tasks.bank
    bank.resize(num_learners)
    for first, *others in bank.gradient_groups:
        for learner in others:
            assert torch.equal(rows(bank)[learner], rows(bank)[first])
            assert bank.step_counts[learner] == bank.step_counts[first]
            for state in bank.state.values():
                assert torch.equal(torch.cat(state.trained(learner)), torch.cat(state.trained(first)))


def test_reseeded_learner_keeps_weights_that_a_healthy_one_shares_and_takes_z_where_there_is_none():
    tasks = tasks_for(GroupedSMA(group_size=2), num_learners=4)
    run(SerialExecutor(tasks), tasks, 3)
    bank, before = tasks.bank, rows(tasks.bank)
    bank.reseed([1, 2, 3], bank.central_buffers([0]))
    assert torch.equal(rows(bank)[:2], before[:2])
    z = torch.cat(bank.z.trained())
    assert torch.equal(rows(bank)[2], z) and torch.equal(rows(bank)[3], z)
    assert bank.step_counts[:4] == [3, 3, 0, 0]
