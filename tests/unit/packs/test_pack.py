"""Packs: every trial's trajectory is what it would be alone, whoever comes, goes or fails beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, AdamW, Augmentation, Trainer
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.executors import EXECUTORS, SerialExecutor
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.optimizers import ParameterGroup, TorchOptimizer
from crossbow_py.packs.pack import NON_FINITE, Pack, PackJob, TrialRow
from crossbow_py.packs.trial import TrialSettings, own_dropout_rate, signature
from crossbow_py.schedules import Cosine, MultiStep, Step
from crossbow_py.train import run_settings
from crossbow_py.train.evaluation.evaluator import Evaluator
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.schedules import Schedule
from tests.thinned import thinned
from tests.trainers import images

ORDER_SEED = 7
NUM_SAMPLES, BATCH = 40, 4
LONGEST = Augmentation(crop_padding=2, flip="alternating", random_erasing=0.5)


def network(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(dropout),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32, 3),
    )


def trial(seed: int, dropout: float = 0.2, **options: Any) -> TrialSettings:
    defaults: dict[str, Any] = {
        "optimizer": SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-3),
        "schedule": Cosine(),
        "batch_size": BATCH,
    }
    return TrialSettings(
        seed=seed, make_model=partial(network, dropout), model_key="network", **{**defaults, **options}
    )


TRIALS: tuple[TrialSettings, ...] = (
    trial(1),
    trial(2, 0.5, optimizer=SGD(learning_rate=0.02, momentum=0.5, weight_decay=0.1), schedule=Step(every_epochs=1.0)),
    trial(3, 0.01, label_smoothing=0.2, augmentation=Augmentation(flip=True)),
    trial(4, optimizer=SGD(learning_rate=0.3, momentum=0.0), augmentation=LONGEST, schedule=MultiStep((0.5,))),
)
ADAM = tuple(
    replace(own, optimizer=AdamW(learning_rate=0.003 * (1 + index), beta1=0.8 + 0.05 * index, weight_decay=0.1 * index))
    for index, own in enumerate(TRIALS)
)

GROUPS = (
    ParameterGroup("7", rate=3.0, clip_norm=0.5),
    ParameterGroup("0", weight_decay=0.3),
    ParameterGroup("1", frozen=True),
)
OF_TORCH = tuple(
    replace(own, optimizer=TorchOptimizer(0.003 * (1 + n), weight_decay=0.1 * n, target=torch.optim.NAdam))
    for n, own in enumerate(TRIALS)
)
GROUPED = tuple(replace(own, optimizer=replace(own.optimizer, groups=GROUPS)) for own in TRIALS)


def job_of(executor: str, epochs: float) -> PackJob:
    return PackJob(
        RunSettings(device="cpu", order_seed=ORDER_SEED),
        Choices(torch.device("cpu"), FP64, executor),
        nn.functional.cross_entropy,
        lambda _, rows: executor,
    )


def pack_of(
    trials: Sequence[TrialSettings], executor: str, epochs: float = 2.0, members: Sequence[TrialRow] | None = None
) -> Pack:
    job = job_of(executor, epochs)
    feed = make_feed(
        images(NUM_SAMPLES), BATCH, ORDER_SEED, augmentation=LONGEST, channels_last=True, dtype=torch.float64
    )
    assert isinstance(feed, ResidentFeed)
    feed = feed.without_augmentation()
    template = trials[0].new_model()
    return Pack(job, "signature", template, feed, members or members_of(trials, epochs, planned=epochs))


def members_of(trials: Sequence[TrialSettings], epochs: float, first: int = 0, planned: float = 2.0) -> list[TrialRow]:
    ends = [round(each * NUM_SAMPLES) for each in (epochs, planned)]
    return [
        TrialRow(first + index, own, None, *ends, own_dropout_rate(own.new_model()) or 0.0)
        for index, own in enumerate(trials)
    ]


def run(pack: Pack) -> None:
    while pack.step():
        pass
    pack.drain()


def trained_alone(own: TrialSettings, epochs: float, device: str) -> dict[str, torch.Tensor]:
    """What a trial is after so many epochs, trained by a trainer, with the running statistics of its own row."""
    trainer = Trainer(
        model=own.make_model, train_data=images(NUM_SAMPLES), optimizer=own.optimizer, schedule=own.schedule,
        augmentation=own.augmentation, batch_size=own.batch_size, num_learners=1, executor="serial", device=device,
        seed=own.seed, order_seed=ORDER_SEED, label_smoothing=own.label_smoothing, averaging=SMA(batch_norm="mean"),
    )  # fmt: skip
    return trainer.fit(max_epochs=epochs).model.state_dict()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    """See `trained_alone`."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    return lambda own, epochs=2.0: trained_alone(own, epochs, "cpu")


def assert_as_alone(pack: Pack, row: int, expected: dict[str, torch.Tensor], tolerance: float = 1e-8) -> None:
    found = pack._bank.learner_state(row)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).double().norm() <= tolerance * (value.double().norm() + 1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])
@pytest.mark.parametrize("trials", [TRIALS, ADAM, GROUPED, OF_TORCH], ids=["sgd", "adamw", "groups", "torch"])
def test_pack_of_different_trials_is_what_each_is_alone(
    alone: Callable[..., Any], executor: str, trials: tuple[TrialSettings, ...]
) -> None:
    with closing(pack_of(trials, executor)) as pack:
        run(pack)
        for row, own in enumerate(trials):
            assert_as_alone(pack, row, alone(own))


@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_trial_that_takes_a_row_later_is_what_it_is_alone_and_so_is_its_neighbour(
    alone: Callable[..., Any], executor: str
) -> None:
    first = members_of(TRIALS[:2], 2.0)
    first[1].end_samples = NUM_SAMPLES
    with closing(pack_of(TRIALS[:2], executor, members=first)) as pack:
        run(pack)
        assert first[1].is_over and not first[0].is_over
        assert_as_alone(pack, 1, planned(alone, TRIALS[1], 1.0))
        begun = pack.checkpoint(first[1])
        late = members_of(TRIALS[2:3], 1.0, first=2)[0]
        pack.assign([first[0], late])
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[0]))
        assert_as_alone(pack, 1, planned(alone, TRIALS[2], 1.0))
        resumed = replace_member(first[1], begun)
        pack.assign([resumed])  # fewer rows than before
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[1]))
        rest = [replace_member(late, None), *members_of(TRIALS[3:], 2.0, first=3)]
        pack.assign([resumed, *rest])  # more rows; the first is over and stays as it is
        assert not pack.step()
        assert_as_alone(pack, 0, alone(TRIALS[1]))


def planned(alone: Callable[..., Any], own: TrialSettings, epochs: float) -> dict[str, torch.Tensor]:
    """After fewer epochs than the schedule plans for."""
    shortened = replace(own, schedule=Ahead(inner=own.schedule))
    state: dict[str, torch.Tensor] = alone(shortened, epochs)
    return state


class Ahead(Schedule):
    """A schedule of a run of 2 epochs, in one that ends sooner."""

    NAME = "ahead"

    def __init__(self, inner: Schedule) -> None:
        object.__setattr__(self, "inner", inner)

    def factor(self, samples: int, samples_per_epoch: int, total_samples: int | None) -> float:
        return self.inner.factor(samples, samples_per_epoch, 2 * NUM_SAMPLES)  # type: ignore[attr-defined,no-any-return]

    def _shape(self, samples: int, samples_per_epoch: int, total_samples: int | None) -> float:
        raise NotImplementedError


def replace_member(member: TrialRow, begun: Any) -> TrialRow:
    return TrialRow(member.trial, member.settings, begun, *2 * (2 * NUM_SAMPLES,), member.dropout_rate)


@pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])
def test_trial_that_diverges_harms_no_other(alone: Callable[..., Any], executor: str) -> None:
    wild = trial(5, optimizer=SGD(learning_rate=1e30, momentum=0.0))
    with closing(pack_of([TRIALS[0], wild], executor)) as pack:
        good, bad = pack.members
        run(pack)
        assert bad.failure == NON_FINITE and good.failure is None and not good.is_over
        pack.assign([good])
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[0]))
        assert good.num_losses == 20 and math.isfinite(good.loss_sum)


def test_packs_over_one_data_set_augment_each_in_its_own_way(alone: Callable[..., Any]) -> None:
    feed = make_feed(images(NUM_SAMPLES), 1, ORDER_SEED, augmentation=LONGEST, channels_last=True, dtype=torch.float64)
    assert isinstance(feed, ResidentFeed)
    feed, larger = feed.without_augmentation(), replace(TRIALS[2], batch_size=8, augmentation=LONGEST)
    packs = [
        Pack(
            job_of("serial", 2.0),
            "signature",
            own.new_model(),
            feed.with_batch_size(own.batch_size),
            members_of([own], 2.0),
        )
        for own in (TRIALS[3], larger)
    ]
    try:
        while sum(pack.step() for pack in packs):  # in turn
            pass
        for pack, own in zip(packs, (TRIALS[3], larger), strict=True):
            pack.drain()
            assert_as_alone(pack, 0, alone(own))
    finally:
        for pack in packs:
            pack.close()


def test_member_that_leaves_unfinished_gives_its_row_to_another(alone: Callable[..., Any]) -> None:
    staying, leaving = members_of(TRIALS[:2], 2.0)
    with closing(pack_of(TRIALS[:2], "serial", members=[leaving, staying])) as pack:
        assert pack.step() and pack.step()
        pack.drain()
        joining = members_of(TRIALS[2:3], 2.0, first=2)[0]
        pack.assign([staying, joining])
        run(pack)
        assert [member.trial for member in pack.members] == [2, 0]
        assert_as_alone(pack, 1, alone(TRIALS[0]))


def test_evaluation_of_members_is_that_of_each_model() -> None:
    feed = make_feed(images(30), 1, channels_last=True, dtype=torch.float64)
    assert_members_evaluated_as_each_model(pack_of(TRIALS, "fused", epochs=0.5), feed)


def assert_members_evaluated_as_each_model(pack: Pack, test_feed: Feed) -> None:
    """After its training."""
    evaluator = Evaluator(pack.template, precision=FP64, loss=nn.functional.cross_entropy, metrics={}, batch_size=8)
    try:
        run(pack)
        asked = [pack.members[2], pack.members[0]]
        found = pack.evaluate(asked, evaluator, test_feed)
        expected = [evaluator.evaluate(pack._bank.learner_state(row), test_feed) for row in (2, 0)]
        assert [each.accuracy for each in found] == [each.accuracy for each in expected]
        assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=1e-9)
    finally:
        pack.close()


def test_signature_is_equal_for_what_may_differ_and_not_for_the_rest() -> None:
    def of(own: TrialSettings) -> str:
        return signature(own, own.new_model())

    assert len({of(own) for own in TRIALS}) == 1
    others = [
        replace(TRIALS[0], batch_size=8),
        replace(TRIALS[0], optimizer=AdamW()),
        replace(TRIALS[0], optimizer=SGD(clip_norm=1.0)),
        replace(TRIALS[0], optimizer=SGD(nesterov=True)),
        replace(TRIALS[0], model_key="another"),
        replace(TRIALS[0], make_model=partial(network, 0.0)),
        replace(TRIALS[0], make_model=lambda: nn.Sequential(network(0.2), nn.Dropout(0.3))),
    ]
    assert len({of(own) for own in (TRIALS[0], *others)}) == 1 + len(others)


def test_change_of_seats_makes_one_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(SerialExecutor):
        def __init__(self, tasks: RoundTasks) -> None:
            made.append(tasks.bank.num_learners)
            super().__init__(tasks)

    monkeypatch.setitem(EXECUTORS, "serial", Counted)
    pack = pack_of(TRIALS[:2], "serial")
    pack.assign([*pack.members, *members_of(TRIALS[2:3], 2.0, first=2)])
    assert made == [2, 3]
    pack.assign([*pack.members[:2], *members_of(TRIALS[3:4], 2.0, first=3)])  # a row changes hands
    assert made == [2, 3]
    pack.close()
