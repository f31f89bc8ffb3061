"""Frozen backbones: neither weights nor running statistics move, in training, averaging, evaluation and packs."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, Ensemble, Independent, Member, Trainer, UserError, frozen, train_many
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.schedules import Constant
from crossbow_py.train import run_settings
from tests.thinned import thinned
from tests.trainers import image_trainer
from tests.unit.packs import test_pack as packs

EXECUTORS = ["serial", "threads", "fused", "fused_threads"]


def backbone() -> nn.Sequential:
    """Features as from elsewhere: always the same weights, and statistics that are not those of the data."""
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    first, norm = made[0], made[1]
    nn.init.normal_(first.weight, std=0.2, generator=torch.Generator().manual_seed(9))
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.copy_(torch.linspace(-0.5, 0.5, 8))
    norm.running_var.copy_(torch.linspace(0.3, 2.0, 8))
    return made


def by_helper() -> nn.Module:
    return nn.Sequential(frozen(backbone()), nn.BatchNorm1d(32), nn.Linear(32, 3))


class ByTrain(nn.Sequential):
    """As the guide on fine-tuning has it: `train()` keeps a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(backbone().requires_grad_(False), nn.BatchNorm1d(32), nn.Linear(32, 3))

    def train(self, mode: bool = True) -> ByTrain:
        super().train(mode)
        self[0].eval()
        return self


WAYS = [by_helper, ByTrain]


def still_part(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("0.")}


def assert_still(state: dict[str, Any]) -> None:
    expected = {f"0.{name}": value for name, value in backbone().state_dict().items()}
    assert still_part(state).keys() == expected.keys()
    assert all(torch.equal(value, expected[name].to(value)) for name, value in still_part(state).items())


@pytest.mark.parametrize(
    ("executor", "make_model"), thinned(itertools.product(EXECUTORS, WAYS), quick=[0, 5], slow=[2, 7])
)
def test_one_learner_trains_as_a_plain_loop_does(make_model: Callable[[], nn.Module], executor: str) -> None:
    trainer = image_trainer(
        model=make_model, num_learners=1, executor=executor, optimizer=SGD(learning_rate=0.05, momentum=0.9),
        schedule=Constant(), augmentation=None, averaging=SMA(batch_norm="mean"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = make_model()
    result = trainer.fit(max_rounds=12)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 4
    reference = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for n in range(12):
        batch = trainer.run.train_feed.batch(4 * n)
        reference.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        reference.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert_still(result.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("make_model", WAYS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "rule",
    [SMA(batch_norm="recalibrate"), SMA(average_ema=1.0), SynchronousSGD(), Independent()],
    ids=["recalibrated", "ema", "synchronous", "independent"],
)
def test_frozen_part_of_several_learners_keeps_every_bit(make_model: Any, executor: str, rule: Any) -> None:
    result = image_trainer(model=make_model, executor=executor, averaging=rule).fit(max_epochs=2)
    for model in result.models or [result.model]:
        assert_still(model.state_dict())
        moved = model.state_dict()["1.running_mean"]  # what is not frozen is measured
        assert moved.abs().max() > 0


@pytest.mark.parametrize("make_model", WAYS)
def test_recalibration_measures_the_other_norms_behind_the_frozen_ones(make_model: Any) -> None:
    averaging = SMA(batch_norm="recalibrate", recalibration_batches=3)
    trainer = image_trainer(model=make_model, averaging=averaging)
    result = trainer.fit(max_rounds=7)
    features = backbone().eval()
    cursor = trainer.state.samples_seen
    batches = [features(trainer.run.train_feed.batch(cursor + 4 * n).inputs) for n in range(3)]
    mean = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    var = torch.stack([batch.var(0) for batch in batches]).mean(0)
    torch.testing.assert_close(result.model.state_dict()["1.running_mean"], mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.model.state_dict()["1.running_var"], var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("executor", "make_model"), thinned(itertools.product(EXECUTORS, WAYS), quick=[0, 5], slow=[2, 7])
)
def test_trials_of_a_pack_keep_it_and_are_what_each_is_alone(
    make_model: Any, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: packs.FP64)
    trials = [
        TrialSettings(
            seed=0, make_model=make_model, model_key="frozen", batch_size=packs.BATCH, schedule=Constant(),
            optimizer=SGD(learning_rate=rate),
        )
        for rate in (0.01, 0.1)
    ]  # fmt: skip
    pack = packs.pack_of(trials, executor)
    packs.run(pack)
    for row, own in enumerate(trials):
        packs.assert_as_alone(pack, row, packs.trained_alone(own, 2.0, "cpu"))
        assert_still(pack._bank.learner_state(row))
    pack.close()


def test_frozen_module_stays_so_in_copies_and_wherever_its_layers_go() -> None:
    for found in (by_helper(), copy.deepcopy(by_helper()), pickle.loads(pickle.dumps(by_helper()))):
        found.train()
        still, moving = found[0][1], found[1]
        assert isinstance(still, nn.BatchNorm2d) and not still.training and moving.training
        assert not any(parameter.requires_grad for parameter in found[0].parameters())
    again = nn.Sequential(*found[0], nn.Linear(32, 3)).train()
    assert [type(layer).__name__ for layer in again if not layer.training] == ["BatchNorm2d"]
    assert again.state_dict().keys() == nn.Sequential(*backbone(), nn.Linear(32, 3)).state_dict().keys()


def test_freezing_twice_is_freezing_once_and_dropout_goes_by_the_mode() -> None:
    once = frozen(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    kind = type(once[0])
    twice = frozen(once).train()
    assert twice is once and type(twice[0]) is kind and type(copy.deepcopy(twice)[0]) is kind
    assert [layer.training for layer in twice] == [False, True]


def test_checkpoint_of_a_trial_has_no_frozen_values_and_goes_on_over_the_same_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of sixteen adapters are to be small, and a base that was exchanged in between must not be taken for it."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: packs.FP64)
    own = TrialSettings(
        seed=0, make_model=by_helper, model_key="frozen", batch_size=packs.BATCH, schedule=Constant(), optimizer=SGD(),
    )  # fmt: skip
    pack = packs.pack_of([own], "serial")
    packs.run(pack)
    checkpoint = pack.checkpoint(pack.members[0])
    whole = pack.state(pack.members[0])
    pack.close()
    assert not {"0.0.weight", "0.1.weight"} & checkpoint.row["weights"].keys() and checkpoint.row["frozen"] == {}
    assert {"0.0.weight", "0.1.weight"} <= whole.keys()
    again = packs.pack_of([own], "serial")
    again.assign([packs.replace_member(again.members[0], checkpoint)])
    state = again.state(again.members[0])
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    again.close()
    moved = copy.deepcopy(checkpoint)
    moved.row["base"] = "another"
    other = packs.pack_of([own], "serial")
    with pytest.raises(UserError, match="frozen parameters are not those that it was trained over"):
        other.assign([packs.replace_member(other.members[0], moved)])
    other.close()


class Masked(nn.Module):
    """A layer on some of the inputs, by a frozen mask that the seed draws."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        order = [0.0, 1.0, 1.0, 0.0] if torch.initial_seed() % 2 else [1.0, 0.0, 0.0, 1.0]
        self.mask = nn.Parameter(torch.tensor(order), requires_grad=False)
        self.features, self.first = nn.Linear(4, 40).requires_grad_(False), nn.Linear(40, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(self.features(x * self.mask)).relu())
        return out


@pytest.mark.slow
def test_members_of_other_frozen_values_and_widths_learn_what_each_learns_alone() -> None:
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(24, 4, generator=draws), torch.randint(0, 3, (24,), generator=draws)
    call = {"batch_size": 4, "max_epochs": 2, "precision": "fp32"}
    members = [Member(seed=seed, model=partial(Masked, width)) for seed, width in enumerate((8, 6, 8, 6, 7, 8))]
    together = train_many(Masked, data, members=members, executor="fused", **call)
    for number, member in enumerate(members):
        alone = train_many(Masked, data, members=[member], executor="serial", **call)[0].state
        assert together[number].status == "finished"
        for name, value in alone.items():
            torch.testing.assert_close(together[number].state[name], value, rtol=1e-5, atol=1e-6)


class Counts(nn.Module):
    """A model that counts its passes in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        out: torch.Tensor = self.layer(x)
        return out


def test_what_forward_writes_is_each_models_own_and_evaluations_leave_it() -> None:
    data = torch.randn(16, 4), torch.randint(0, 3, (16,))
    trainer = Trainer(Counts, data, data, batch_size=4, num_learners=1, executor="serial", precision="fp32")
    trainer.fit(max_epochs=2)
    assert trainer.run.bank.learner_state(0)["seen"] == 8
    found = train_many(Counts, data, data, members=2, batch_size=4, max_epochs=2, executor="serial", precision="fp32")
    assert [float(own.state["seen"]) for own in found] == [8, 8]


def test_independent_learners_keep_frozen_values_if_only_a_later_one_has_others() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        seeds.append(torch.initial_seed())
        nn.init.constant_(model[0].weight, float(len(set(seeds)) > 2))  # the first two models are alike
        return model

    seeds: list[int] = []
    data = torch.randn(16, 4), torch.randint(0, 3, (16,))
    trainer = Trainer(make, data, batch_size=4, num_learners=3, averaging="independent", executor="serial")
    assert float(trainer.run.bank.learner_state(0)["0.weight"][0, 0]) == 0
    assert not trainer.run.bank.base.is_shared


def test_models_that_are_frozen_throughout_predict_together() -> None:
    models = [nn.Linear(4, 3).requires_grad_(False) for _ in range(2)]
    inputs = torch.randn(5, 4)
    with Ensemble(models, executor="fused", device="cpu") as ensemble:
        found = ensemble.members(inputs)
    for number, model in enumerate(models):
        torch.testing.assert_close(found[number], model(inputs).softmax(1))
