"""Small engines for tests: real parts, tiny models, float64 where exactness is the question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.averaging import SMA, AveragingRule, Stage
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.goodput import compares_in
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.modules.precision import FP64, Precision
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.optimizers import SGD, Optimizer
from crossbow_py.engine.update.outer_step import take_outer_step
from crossbow_py.engine.update.update_choice import choose_update

CPU = torch.device("cpu")
# Executors of the host, and the order of the bank that each runs on.
ON_CPU = [("serial", "rows"), ("threads", "rows"), ("fused", "blocks"), ("fused_threads", "blocks")]
ON_ALL = pytest.mark.parametrize(("executor", "order"), ON_CPU)


def linear_model() -> nn.Module:
    """4 features, 3 classes; the same weights every time."""
    model = nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def norm_model() -> nn.Sequential:
    """A small convolutional network with BatchNorm, channels-last blocks and a frozen parameter."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    model[5].bias.requires_grad_(False)
    return model


def norm_with_dropout() -> nn.Sequential:
    """`norm_model` with dropout before its linear layer."""
    model = norm_model()
    model.insert(4, nn.Dropout(0.3))
    return model


class Changed(Feed):
    """Another feed's batches, each changed by its position in the stream: by no way but `batch`."""

    def __init__(self, feed: Feed, change: Callable[[int, Batch], Batch] = lambda start, batch: batch) -> None:
        super().__init__(feed.num_samples, feed.batch_size)
        self._feed, self.change = feed, change

    def batch(self, start):
        return self.change(start, self._feed.batch(start))

    def evaluation_batches(self, batch_size, first=0, step=1):
        return self._feed.evaluation_batches(batch_size)


def poison(tasks: RoundTasks, start: int, value: float) -> None:
    """Make the batch at one stream position hold `value` and nothing else, before or after an executor is made."""
    tasks.feed = tasks.feed if isinstance(tasks.feed, Changed) else Changed(tasks.feed)
    tasks.feed.change = lambda position, found: (
        found._replace(inputs=torch.full_like(found.inputs, value)) if position == start else found
    )


def features(num_samples: int, shape: tuple[int, ...] = (4,), num_classes: int = 3) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, always the same."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn((num_samples, *shape), generator=generator)
    return inputs, torch.randint(0, num_classes, (num_samples,), generator=generator)


IMAGES = features(48, (3, 6, 6))


def feed_of(inputs: Tensor, targets: Tensor, precision: Precision = FP64) -> Feed:
    """For evaluators: in batches of one."""
    return make_feed((inputs, targets), 1, channels_last=True, dtype=precision.compute)


def make_tasks(
    make_model: Callable[[], nn.Module] = linear_model,
    *,
    num_learners: int = 2,
    optimizer: Optimizer = SGD(),
    rule: AveragingRule = SMA(),
    data: tuple[Tensor, Tensor] | None = None,
    batch_size: int = 4,
    precision: Precision = FP64,
    seed: int = 0,
    order: Order | None = None,
    kernels: bool = False,
    channels_last: bool = True,
    compares: bool = False,
    loss: Loss = nn.functional.cross_entropy,
    accumulate: int = 1,
    smoothing: float = 0.0,
    shares_base: bool = True,
    one_row: bool = False,
) -> RoundTasks:
    """Task bodies over a bank on CPU. A learner's step takes `accumulate` batches."""
    model = optimizer.prepared(make_model())
    bank = ReplicaBank(
        model, num_learners, device=CPU, precision=precision, state_names=optimizer.state_names, order=order,
        channels_last=channels_last, has_velocity=rule.has_velocity, gradient_mean=rule.gradient_mean,
        matrices=optimizer.matrices(model), groups=optimizer.group_numbers(model),
        row_optimizer=optimizer.row_optimizer, shares_base=shares_base, one_row=one_row,
    )  # fmt: skip
    feed = make_feed(
        data or features(64), batch_size * accumulate, seed, channels_last=True, dtype=precision.compute,
        kernels=kernels,
    )  # fmt: skip
    return RoundTasks(
        bank,
        update=choose_update(optimizer, rule, CPU, precision.master)[0],
        feed=feed,
        loss=loss,
        seed=seed,
        collective=Collective(),
        compares=compares,
        accumulate=accumulate,
        label_smoothing=torch.full((num_learners,), smoothing) if smoothing else None,
    )


def plan(tasks: RoundTasks, index: int, learning_rate: float = 0.1, factor: float = 1.0) -> Round:
    """Round `index` at a learning rate times a factor, the stream shared out among the learners."""
    learners, size, rule = tasks.bank.num_learners, tasks.feed.batch_size, tasks.update.rule
    stage = Stage(
        index, tasks.bank.total_learners, learning_rate * factor, factor, index % rule.averaging_period + 1,
        num_devices=tasks.bank.num_devices,
    )  # fmt: skip
    return Round(
        index=index,
        starts=tuple((index * learners + learner) * size for learner in range(learners)),
        learning_rates=(learning_rate * factor,) * learners,
        together=rule.round(stage),
        compares=tasks.compares and learners > 1 and compares_in(index, learners, 0),
    )


def run_rounds(
    tasks: RoundTasks,
    executor: str,
    num_rounds: int,
    learning_rate: float = 0.1,
    factor: Callable[[int], float] = lambda _: 1.0,
) -> list[float]:
    """Run rounds, with their outer steps, through an executor; returns every loss, in round and learner order."""
    runner: Executor = EXECUTORS[executor](tasks)
    outcomes = []
    try:
        for index in range(num_rounds):
            own = plan(tasks, index, learning_rate, factor(index))
            outcomes += runner.submit(own)
            if own.outer_step is not None:
                outcomes += runner.drain()
                take_outer_step(tasks.bank, own.outer_step, tasks.collective)
        outcomes += runner.drain()
    finally:
        runner.close()
    return [loss for outcome in outcomes for loss in outcome.losses]


def run(
    runner: Executor,
    tasks: RoundTasks,
    num_rounds: int,
    rate: Callable[[int], float] = lambda _: 0.05,
    shared: bool = False,
) -> list[RoundOutcome]:
    """Run rounds, of the first learner's batch for all if `shared`. Returns the outcomes; closes the executor."""
    outcomes = []
    try:
        for n in range(num_rounds):
            whole = plan(tasks, n, rate(n))
            if shared:
                whole = dataclasses.replace(whole, starts=whole.starts[:1] * len(whole.starts))
            outcomes += runner.submit(whole)
        return outcomes + runner.drain()
    finally:
        runner.close()


def bank_reseeded_in_the_middle(make_runner: Callable[[RoundTasks], Executor], tasks: RoundTasks) -> ReplicaBank:
    """After five rounds, learner 1 reseeded beside 0 and 2, and five more."""
    runner = make_runner(tasks)
    for n in range(10):
        if n == 5:
            runner.drain()
            tasks.bank.reseed([1], tasks.bank.central_buffers([0, 2]))
        runner.submit(plan(tasks, n, 0.01))
    runner.drain()
    runner.close()
    return tasks.bank


def assert_learners_equal(ours: ReplicaBank, reference: ReplicaBank, tolerance: float = 1e-8) -> None:
    """Equal learners and z of two banks whatever their order and room: norms to a tolerance, the rest to the bit."""
    k = reference.num_learners
    assert ours.step_counts[:k] == reference.step_counts[:k]
    states = [(ours.learner_state(j), reference.learner_state(j)) for j in range(k)]
    for mine, theirs in [*states, (ours.z.shaped(), reference.z.shaped())]:
        for name, expected in theirs.items():
            if expected.is_floating_point() and expected.isfinite().all():
                assert (mine[name] - expected).norm() <= tolerance * (expected.norm() + 1e-3), name
            else:
                assert torch.equal(mine[name], expected), name


def assert_equal(
    ours: ReplicaBank,
    reference: ReplicaBank,
    found: Sequence[RoundOutcome],
    expected: Sequence[RoundOutcome],
    tolerance: float = 1e-8,
) -> None:
    """Equal banks of two orders, and outcomes, of equal runs."""
    assert [o.plan.index for o in found] == [o.plan.index for o in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=tolerance)
        assert (mine.num_correct, mine.finite) == (theirs.num_correct, theirs.finite)
    assert_learners_equal(ours, reference, tolerance)
