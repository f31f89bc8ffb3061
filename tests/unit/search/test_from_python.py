"""`Search`: what the command does, from Python, against `Trainer` with the same settings."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from crossbow_py import SGD, Search, Trainer, UserError
from crossbow_py.core.targets import import_target
from tests.trainers import blobs

SPACE = {"model.hidden": [4, 6], "optimizer.learning_rate": {"low": 0.01, "high": 0.3, "log": True}}
DATA: Any = blobs(60)
REST: Any = blobs(30)


def make(hidden: int) -> nn.Module:
    inputs = DATA[0].flatten(1).shape[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def search(**settings: Any) -> Search:
    given = {"space": SPACE, "validation_data": REST, "max_epochs": 2, "method": "none", "num_trials": 3}
    return Search(make, DATA, **{**given, "executor": "serial", "device": "cpu", "batch_size": 6, **settings})


def test_best_trial_is_what_a_trainer_makes_of_its_settings(tmp_path: Path) -> None:
    found = search(output_dir=tmp_path / "search").run()
    assert found.params is not None and found.summary.best is not None and found.model is not None
    trainer = Trainer(
        lambda: make(found.params["model.hidden"]), DATA, REST, batch_size=6, num_learners=1, executor="serial",
        optimizer=SGD(learning_rate=found.params["optimizer.learning_rate"]), seed=found.summary.best.seed,
        order_seed=0, device="cpu",
    )  # fmt: skip
    result = trainer.fit(max_epochs=2)
    for name, value in result.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
    assert found.value == result.test_accuracy == max(row["value"] for row in found.rows())
    assert found.test_accuracy is not None  # of the validation data, as there is no other
    again = search(output_dir=tmp_path / "search").run()
    assert (again.params, again.rows()) == (found.params, found.rows())
    assert again.summary.train_time_s == found.summary.train_time_s  # as search.json has it: nothing was trained
    assert "3 trials by validation_accuracy" in str(found)
    with pytest.raises(UserError, match="another search"):  # what it minimises is what it is
        search(output_dir=tmp_path / "search", loss=nn.CrossEntropyLoss(label_smoothing=0.1)).run()


class Scaled(nn.Module):
    """Dropout, and in one of two forms something else by its rate, too."""

    def __init__(self, rate: float, scales: bool) -> None:
        super().__init__()
        self.inputs, self.drop = nn.Linear(DATA[0].flatten(1).shape[1], 4), nn.Dropout(rate)
        self.outputs, self.scale = nn.Linear(4, 3), rate if scales else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.outputs(self.drop(self.inputs(x.flatten(1))))


@pytest.mark.parametrize(("scales", "side_by_side"), [(False, True), (True, False)])
def test_rate_of_dropout_of_a_model_of_ones_own_is_each_trials_where_it_is_nothing_else(
    scales: bool, side_by_side: bool
) -> None:
    """Else each trial is a pack of its own, or trials compute with another one's scale."""
    space = {"model.rate": {"low": 0.1, "high": 0.9}}
    given = {"batch_size": 6, "max_epochs": 1, "method": "none", "num_trials": 3, "validation_data": REST}
    found = Search(lambda rate: Scaled(rate, scales), DATA, space=space, executor="fused", precision="fp32", **given)
    result = found.run()
    assert result.summary.best is not None and result.params is not None
    kinds = [note for note in result.summary.notes if note.startswith("Trials of ")]
    assert len(kinds) == (1 if side_by_side else 3)
    trainer = Trainer(
        lambda: Scaled(result.params["model.rate"], scales), DATA, REST, batch_size=6, num_learners=1,
        executor="serial", seed=result.summary.best.seed, order_seed=0, device="cpu", precision="fp32",
    )  # fmt: skip
    trained = trainer.fit(max_epochs=1)
    assert result.value == pytest.approx(trained.test_accuracy, abs=1e-6)


@pytest.mark.slow
def test_widths_that_are_near_each_other_share_packs() -> None:
    """The best trial, padded or not, is what a trainer makes of its settings."""
    found = search(space={**SPACE, "model.hidden": {"low": 5, "high": 8}}, executor="fused", precision="fp32").run()
    assert any("padded with zeros" in note for note in found.summary.notes)
    assert found.params is not None and found.summary.best is not None and found.model is not None
    trainer = Trainer(
        lambda: make(found.params["model.hidden"]), DATA, batch_size=6, num_learners=1, executor="serial",
        optimizer=SGD(learning_rate=found.params["optimizer.learning_rate"]), seed=found.summary.best.seed,
        order_seed=0, device="cpu", precision="fp32",
    )  # fmt: skip
    expected = trainer.fit(max_epochs=2).model.state_dict()
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_trials_begin_with_the_weights_of_a_file_in_the_unit_that_it_counts_in(tmp_path: Path) -> None:
    before = make(4)
    save_file(before.state_dict(), tmp_path / "weights.safetensors")
    data, rest = ((own[0], 50 + own[0].flatten(1)[:, :3]) for own in (DATA, REST))
    found = Search(
        make, data, validation_data=rest, space={"model.hidden": [4], "optimizer.learning_rate": [0.0]}, max_epochs=1,
        loss=nn.MSELoss(), init_from=tmp_path / "weights.safetensors", method="none", num_trials=1, executor="serial",
        device="cpu",
    ).run()  # fmt: skip
    assert found.model is not None
    assert all(torch.equal(own, found.model.state_dict()[name]) for name, own in before.state_dict().items())


def test_any_loss_and_metric_is_searched() -> None:
    """The least of a metric, of a loss that is not cross-entropy; without a folder nothing is left behind."""
    targets = DATA[0].flatten(1)[:, :3] * 2
    rest = REST[0].flatten(1)[:, :3] * 2
    found = Search(
        make, (DATA[0], targets), space=SPACE, validation_data=(REST[0], rest), loss=nn.MSELoss(), max_epochs=2,
        metrics={"mae": nn.functional.l1_loss}, metric="mae", maximize=False, method="none", num_trials=2,
        executor="serial", device="cpu", precision="fp32", optimizer="adamw",
    ).run()  # fmt: skip
    assert found.model is not None
    with torch.no_grad():
        expected = nn.functional.l1_loss(found.model(REST[0]), rest)
    assert found.value == pytest.approx(float(expected), rel=1e-5) == min(row["value"] for row in found.rows())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_trial": 3}, TypeError, "num_trials"),
        (
            {"space": {"model.hiden": [1, 2]}},
            UserError,
            "model.hiden is no argument of the model; did you mean 'hidden'",
        ),
        ({"space": {"hidden": [1, 2]}}, UserError, "write it as model.hidden"),
        ({"loss": nn.MSELoss(), "label_smoothing": 0.1}, UserError, "label_smoothing is for cross-entropy"),
        ({"metric": "f1"}, UserError, "metric must be accuracy, loss or one of metrics"),
        ({"validation_data": DATA[0]}, UserError, "validation data .* one array"),
    ],
)
def test_mistakes_get_one_line(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search(**settings).run()


@pytest.mark.slow
def test_data_are_held_no_longer_than_the_search() -> None:
    kept = weakref.ref(first := search())
    path = first.config.data.target
    assert callable(import_target("data.target", path))
    del first
    gc.collect()
    assert kept() is None
    with pytest.raises(UserError, match="cannot be imported"):
        import_target("data.target", path)
