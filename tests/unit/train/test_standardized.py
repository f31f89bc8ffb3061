"""Regression on targets of any unit: models count in deviations of their own targets, and predict in their unit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from crossbow_py import SGD, AdamW, Independent, Member, Search, Trainer, UserError, load_models, train_many
from crossbow_py.data.sampler import epoch_order
from crossbow_py.engine.modules.losses import loss_of_rows
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.modules.standardized import is_standardized as is_done
from crossbow_py.engine.modules.standardized import statistics_of
from crossbow_py.schedules import Constant, Cosine
from crossbow_py.train import run_settings
from crossbow_py.train.checks.seeded_model import seeded_model
from tests.thinned import thinned

_DRAWS = torch.Generator().manual_seed(0)
INPUTS = torch.randn(48, 4, generator=_DRAWS)
# Columns of units that are far apart.
TARGETS = INPUTS[:, :2] * torch.tensor([100.0, 0.01]) + torch.tensor([500.0, -3.0])
DATA = INPUTS, TARGETS
HALF = [*range(0, 48, 2)]


def linear(columns: int = 2) -> nn.Module:
    return nn.Linear(4, columns)


def options(**given: Any) -> dict[str, Any]:
    fixed: dict[str, Any] = {"loss": nn.MSELoss(), "batch_size": 8, "optimizer": SGD(learning_rate=0.1, momentum=0.0)}
    return {**fixed, "executor": "serial", "device": "cpu", "precision": "fp32", **given}


def trainer(data: Any = DATA, test: Any = None, model: Any = linear, **given: Any) -> Trainer:
    return Trainer(model, data, test, **options(num_learners=1, averaging=Independent(), **given))


def plain_loop(ids: list[int], seed: int, epochs: int, loss: Any) -> tuple[dict[str, np.ndarray], float]:
    """Weights after a loop on targets that NumPy standardized, and the loss of all samples in their own unit."""
    own = TARGETS[ids].double().numpy()
    mean, std = own.mean(0), own.std(0)
    inputs, targets = INPUTS[ids].double(), torch.from_numpy((own - mean) / std)
    model = seeded_model(linear, seed, None).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for batch in epoch_order(0, epoch, len(ids)).reshape(-1, 8):
            optimizer.zero_grad()
            loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        predicted = model(INPUTS.double()) * torch.from_numpy(std) + torch.from_numpy(mean)
        return {n: w.numpy() for n, w in model.state_dict().items()}, float(loss(predicted, TARGETS.double()))


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(delta=0.5)])
@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_rows_train_as_a_loop_on_standardized_targets_and_are_measured_in_their_unit(
    executor: str, loss: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by its own samples' mean and deviation, in every column, to 1e-6 of float32 statistics."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    members = [Member(subset=HALF), Member(), Member(subset=[5, 5, 5, *range(20, 25)])]
    found = train_many(
        linear, DATA, DATA, members=members, max_epochs=4,
        **options(standardize_targets=True, executor=executor, loss=loss),
    )  # fmt: skip
    for number, ids in enumerate((HALF, [*range(48)], [5, 5, 5, *range(20, 25)])):
        weights, expected = plain_loop(ids, number, 4, loss)
        state = found[number].model.state_dict()
        for name, value in weights.items():
            np.testing.assert_allclose(state[name].numpy(), value, atol=1e-5)
        assert found[number].test_loss == pytest.approx(expected, rel=1e-4)


def test_run_predicts_in_the_unit_of_its_targets_and_so_do_its_files(tmp_path: Path) -> None:
    ours = trainer(test=DATA, standardize_targets=True, output_dir=tmp_path)
    result = ours.fit(max_epochs=30)
    predicted = ours.predict(INPUTS).outputs
    assert ((predicted - TARGETS).abs().amax(0) < torch.tensor([5.0, 5e-4])).all()
    assert result.test_loss == pytest.approx(float(nn.functional.mse_loss(predicted, TARGETS)), rel=1e-5)
    (loaded,) = load_models(tmp_path, model=linear)
    assert torch.equal(loaded(INPUTS), predicted)
    (file,) = tmp_path.glob("*.safetensors")
    save_file(seeded_model(linear, 0, None).state_dict(), tmp_path / "plain.safetensors")
    plain = trainer(optimizer=None, init_from=tmp_path / "plain.safetensors")
    assert not is_done(plain.run.evaluator.template)
    with pytest.raises(UserError, match="is of a model of plain targets; set standardize_targets=False"):
        trainer(standardize_targets=True, init_from=tmp_path / "plain.safetensors")
    again = trainer(test=DATA, init_from=file)  # a model that goes on counts as it did
    again.fit(max_rounds=1)
    assert (again.predict(INPUTS).outputs - predicted).abs()[:, 0].max() < 1
    copies = train_many(lambda: copy.deepcopy(loaded), DATA, DATA, members=2, max_rounds=1, **options())
    assert copies[1].test_loss < 1e-3


def test_rows_of_weight_zero_do_not_count_in_mean_and_deviation() -> None:
    """Catches an outlier that is never drawn and yet sets the scale, in runs and members."""
    wild = TARGETS.clone()
    wild[1::2] = 1e6
    weights = [1.0, 0.0] * 24
    fixed = options(optimizer=None, standardize_targets=True)
    run = Trainer(linear, (INPUTS, wild), num_learners=1, averaging=Independent(), sample_weights=weights, **fixed)
    members = [Member(sample_weights=weights), Member(subset=[0, 0, 1], sample_weights=[1, 2, 0])]
    found = train_many(linear, (INPUTS, wild), members=members, max_rounds=1, **{**fixed, "batch_size": 2})
    for model in (run.fit(max_rounds=1).model, found[0].model):
        torch.testing.assert_close(model.target_mean, TARGETS[::2].mean(0))
        torch.testing.assert_close(model.target_std, TARGETS[::2].std(0, correction=0))
    torch.testing.assert_close(found[1].model.target_mean, TARGETS[0])
    by_hand = statistics_of(torch.tensor([0.0, 4.0]), weights=np.array([3.0, 1.0]))
    assert [float(each) for each in by_hand] == pytest.approx([1.0, 3.0**0.5])


def test_single_column_may_lack_its_dimension() -> None:
    data = INPUTS, TARGETS[:, 0]

    class Flat(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).squeeze(1)

    for executor in ("serial", "fused"):
        found = train_many(lambda: Flat(4, 1), data, data, members=2, max_epochs=30,
                           **options(standardize_targets=True, executor=executor))  # fmt: skip
        assert found[1].model(INPUTS).shape == (48,)
        assert found[1].test_loss < 25.0


class Named(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.target_mean = 0.0


@pytest.mark.parametrize(
    ("given", "is_standardized"),
    [
        ({"optimizer": None}, True),
        ({}, False),
        ({"optimizer": None, "standardize_targets": False}, False),
        ({"optimizer": None, "loss": nn.BCEWithLogitsLoss()}, False),
        ({"optimizer": None, "loss": nn.HuberLoss()}, False),  # whose threshold is in the targets' unit
        ({"optimizer": None, "model": Named}, False),
        ({"optimizer": None, "loss": lambda output, targets: (output - targets).abs().mean()}, False),
    ],
)
def test_only_runs_whose_optimizer_is_not_given_standardize_by_themselves(
    given: dict[str, Any], is_standardized: bool
) -> None:
    data = INPUTS, (TARGETS.mean(0) < TARGETS).float()
    model = trainer(data, **given).fit(max_rounds=1).model
    many = train_many(given.pop("model", linear), data, members=1, max_rounds=1, **options(**given))[0].model
    assert {is_done(model), is_done(many)} == {is_standardized}


@pytest.mark.slow
def test_members_are_all_standardized_or_none_and_it_is_said() -> None:
    """Catches members in one call that are compared in training losses of other units, without a word."""
    members = [Member(), Member(seed=1, optimizer=SGD(learning_rate=1e-6))]
    plain = options(optimizer=None)
    for given, expected in ((members, False), (members[1:], False), (members[:1], True), (2, True)):
        found = train_many(linear, DATA, members=given, max_rounds=1, **plain)
        assert {is_done(each.model) for each in found} == {expected}
        assert any("Targets are not standardized" in each for each in found.notes) == (given is members)
    asked = train_many(linear, DATA, members=members, max_rounds=1, **{**plain, "standardize_targets": True})
    assert {is_done(each.model) for each in asked} == {True}


def test_members_of_different_units_are_not_ranked_by_their_training_losses() -> None:
    wide, narrow = torch.randn(40, 1), torch.randn(40, 1)
    data = INPUTS.repeat(2, 1)[:80], torch.cat([1000 * wide, narrow])
    members = [Member(subset=range(40)), Member(subset=range(40, 80))]
    found = train_many(lambda: linear(1), data, members=members, max_epochs=1, **options(optimizer=None))
    assert [each.name for each in found.best_first()] == ["0", "1"]


def test_search_standardizes_by_the_training_part() -> None:
    pytest.importorskip("optuna")
    found = Search(
        linear, DATA, space={"optimizer.learning_rate": [0.01, 0.1]}, loss=nn.MSELoss(), max_epochs=10, batch_size=8,
        num_trials=2, method="none", standardize_targets=True, executor="serial", device="cpu",
    ).run()  # fmt: skip
    assert found.model is not None and (found.model(INPUTS) - TARGETS).abs()[:, 0].max() < 60
    assert (found.model.target_mean - TARGETS.mean(0)).abs()[0] > 0  # type: ignore[operator, union-attr]


def test_search_leaves_models_alone_that_have_such_a_buffer_themselves() -> None:
    pytest.importorskip("optuna")
    found = Search(
        Named, DATA, space={"optimizer.weight_decay": [0.0, 0.1]}, loss=nn.MSELoss(), max_epochs=1, batch_size=8,
        num_trials=1, method="none", executor="serial", device="cpu",
    ).run()  # fmt: skip
    assert found.model is not None and not is_done(found.model)


def test_statistics_by_hand() -> None:
    mean, std = statistics_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [100.0, 0.0]]), np.array([0, 1, 1, 1]))
    assert mean.tolist() == [2.5, 7.0]
    assert std.tolist() == pytest.approx([0.75**0.5, 1.0])  # a column that is all the same is only shifted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": lambda: nn.Linear(4, 3)}, r"as many numbers a sample as .* got \[2, 3\] where each target has 2"),
        ({"data": (INPUTS, torch.arange(48))}, r"is for floating targets .*, got \[48\] of int64; set it to False"),
        ({"data": [(torch.zeros(4), torch.zeros(2))] * 16}, "needs training data that are tensors"),
        ({"data": (INPUTS, TARGETS.log())}, "targets are not all finite, .* leave such samples out"),
        ({"loss": None}, "standardize_targets=True is for regression, got cross-entropy"),
        ({"model": Named}, "adds target_mean to the model, which has one; rename it"),
        ({"standardize_targets": "yes"}, "standardize_targets must be True, False or 'auto', got 'yes'"),
    ],
)
def test_what_cannot_be_standardized_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(**{"standardize_targets": True, **given}).fit(max_rounds=1)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.SmoothL1Loss(beta=0.3), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0])),
     nn.functional.huber_loss],
)  # fmt: skip
def test_losses_of_rows_in_one_call_are_those_of_each(loss: Any) -> None:
    outputs, targets = torch.randn(3, 5, 2, dtype=torch.float64), torch.rand(3, 5, 2, dtype=torch.float64)
    of_rows = loss_of_rows(loss)
    assert of_rows is not None
    expected = torch.stack([loss(*each) for each in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(of_rows(outputs, targets), expected, rtol=1e-12, atol=0)


def test_other_losses_have_no_call_for_all_rows() -> None:
    assert loss_of_rows(nn.MSELoss(reduction="sum")) is None
    assert loss_of_rows(nn.functional.cross_entropy) is None
    assert loss_of_rows(type("Own", (nn.MSELoss,), {})()) is None  # whose forward may be another


# --- defaults ------------------------------------------------------------------------------------------------------


def test_rate_falls_to_zero_where_neither_it_nor_the_optimizer_is_given() -> None:
    falling = trainer(optimizer=None).run.schedule
    assert [round(falling.factor(seen, 48, 192), 4) for seen in (0, 48, 96, 192)] == [1.0, 0.8536, 0.5, 0.0]
    assert falling.factor(48, 48, None) == 1.0  # of a run that ends by its accuracy or its time
    for given in ({"optimizer": None, "schedule": "constant"}, {}):
        assert trainer(**given).run.schedule == Constant()


def test_members_rate_falls_unless_they_have_an_optimizer_of_their_own() -> None:
    fixed = options(optimizer=None, standardize_targets=True)
    own = AdamW(learning_rate=0.01)
    members = [Member(seed=1), Member(seed=1, optimizer=own, schedule=Cosine()), Member(seed=1, optimizer=own)]
    found = train_many(linear, DATA, members=members, max_epochs=4, **fixed)
    falls, asked, stays = (each.model.weight for each in found)
    assert torch.equal(falls, asked) and not torch.equal(falls, stays)
