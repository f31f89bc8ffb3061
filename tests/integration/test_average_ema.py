"""Runs whose model is the EMA of z: against NumPy in float64, with learners that come and go, and what is saved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from crossbow_py import SMA, Result, Trainer
from crossbow_py.averaging import LocalSGD
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.schedules import MultiStep
from crossbow_py.train import run_settings
from crossbow_py.train.evaluation.evaluator import evaluate_in_memory
from tests.rank_jobs import before_each_round, tuned
from tests.trainers import Recorder, image_model, images, make_trainer

Values = dict[str, npt.NDArray[np.float64]]
NUM_SAMPLES, ROUNDS = 40, 50


@dataclass
class Seen:
    """Samples seen, learners, and the floating-point values of z's state dict then."""

    samples: int
    num_learners: int
    values: Values


def look(trainer: Trainer) -> Seen:
    """With `serial` nothing is in flight."""
    bank, rule = trainer.run.bank, trainer.run.rule
    state = {name: value for name, value in bank.central_state().items() if value.is_floating_point()}
    if rule.shows_mean:
        rows = [bank.learner_state(learner) for learner in range(bank.num_learners)]
        state |= {name: torch.stack([row[name] for row in rows]).mean(0) for name in bank.z.shaped()}
    return Seen(
        trainer.state.samples_seen, bank.num_learners, {name: value.numpy().copy() for name, value in state.items()}
    )


def watched(trainer: Trainer) -> list[Seen]:
    """Filled before each round."""
    found = list[Seen]()
    before_each_round(trainer, lambda trainer: found.append(look(trainer)))
    return found


def reference(seen: list[Seen], horizon: int) -> Values:
    """The EMA at the last of them, moved where a multiple of a twentieth of the horizon is passed, and at the end."""
    apart, last = horizon // 20, 0
    ema = {name: np.zeros_like(value) for name, value in seen[0].values.items()}
    for before, now in itertools.pairwise(seen):
        passed = any(before.samples < multiple <= now.samples for multiple in range(0, now.samples + 1, apart))
        if not (passed or now is seen[-1]):
            continue
        since, last = now.samples - last, now.samples
        share = max(1 - np.exp(-since / horizon), 1 - (1 - since / now.samples) ** 10)
        ema = {name: (1 - share) * value + share * now.values[name] for name, value in ema.items()}
    return ema


def trainer_of(**options: Any) -> Trainer:
    """BatchNorm and dropout; an epoch is 40 samples, a horizon of 5 epochs 200, a twentieth of it 10."""
    defaults: dict[str, Any] = {"model": image_model, "train_data": images(NUM_SAMPLES), "test_data": images(30)}
    return make_trainer(**{**defaults, "averaging": SMA(average_ema=5.0, batch_norm="mean"), **options})


def assert_is(result: Result, expected: Values, tolerance: float = 1e-12) -> None:
    found = {name: value for name, value in result.model.state_dict().items() if value.is_floating_point()}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture
def fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in double precision."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(
    "options",
    [
        {"num_learners": 1},
        {"num_learners": 2},
        {"num_learners": 3},
        {
            "averaging": LocalSGD(averaging_period=4, average_ema=5.0, batch_norm="mean"),
            "schedule": MultiStep(milestones=(3.0, 6.0)),
        },
    ],
    ids=["one learner", "two", "three", "outer steps and restarts"],
)
def test_model_after_fifty_rounds_is_the_ema_worked_out_in_numpy(options: dict[str, Any]) -> None:
    trainer = trainer_of(**options)
    seen = watched(trainer)
    result = trainer.fit(max_rounds=ROUNDS)
    seen.append(look(trainer))
    assert len(seen) == ROUNDS + 1
    assert_is(result, reference(seen, 200))
    assert np.abs(result.model.state_dict()["0.weight"].numpy() - seen[-1].values["0.weight"]).max() > 1e-4


@pytest.mark.usefixtures("fp64")
def test_learners_that_come_and_go_leave_the_ema_and_its_horizon_in_samples() -> None:
    trainer = trainer_of(num_learners=1)
    seen = watched(trainer)
    for num_learners in (1, 3, 2, 1):
        trainer.run.bank.resize(num_learners)
        result = trainer.fit(max_rounds=15)
        seen.append(look(trainer))
    assert [number for number, _ in itertools.groupby(each.num_learners for each in seen)] == [1, 3, 2, 1]
    assert_is(result, reference(seen, 200))


@pytest.mark.slow
@pytest.mark.usefixtures("fp64")
def test_ema_of_a_run_that_the_auto_tuner_grows_is_that_of_what_z_was() -> None:
    trainer = trainer_of(num_learners="auto", max_learners=4)
    seen = watched(trainer)
    tuned(trainer)
    result = trainer.fit(max_rounds=ROUNDS)
    seen.append(look(trainer))
    assert len({each.num_learners for each in seen}) > 1
    assert_is(result, reference(seen, 200))


@pytest.mark.slow
def test_what_is_measured_saved_and_returned_is_the_ema_and_z_goes_where_it_goes_without(tmp_path: Path) -> None:
    recorder = Recorder()
    plain = trainer_of(averaging=SMA())
    plain.fit(max_epochs=6)
    trainer = trainer_of(output_dir=tmp_path, callbacks=[recorder])
    result = trainer.fit(max_epochs=6)
    parts = trainer.run
    assert torch.equal(parts.bank.z.storage, plain.run.bank.z.storage)
    state = result.model.state_dict()
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert not torch.equal(state["0.weight"], parts.bank.z.shaped()["0.weight"])
    assert not torch.equal(state["1.running_var"], parts.bank.central_state()["1.running_var"])
    assert parts.test_feed is not None
    ema, z = (
        evaluate_in_memory(parts.evaluator, each, parts.test_feed, parts.bank.device).loss
        for each in (state, parts.bank.central_state())
    )
    assert result.summary.test_loss == recorder.of("epoch")[-1].test_loss == trainer.evaluate().loss == ema != z
    assert recorder.of("start")[0].average_ema == 5.0


def test_statistics_measured_anew_are_those_of_the_ema() -> None:
    averaging = SMA(average_ema=5.0, batch_norm="recalibrate", recalibration_batches=3)
    trainer = trainer_of(averaging=averaging)
    model = trainer.fit(max_rounds=20).model.state_dict()
    parts, cursor = trainer.run, trainer.state.samples_seen
    inputs = [parts.train_feed.batch(cursor + 4 * n).inputs for n in range(3)]
    expected = parts.evaluator.recalibrate(model, inputs)
    assert all(torch.equal(model[name], expected[name]) for name in model)
    of_z = parts.evaluator.recalibrate(parts.bank.central_state(), inputs)
    assert not torch.equal(model["1.running_mean"], of_z["1.running_mean"])


def test_learner_that_went_non_finite_is_not_in_the_ema() -> None:
    inputs, targets = images(NUM_SAMPLES)
    inputs = inputs / 255
    inputs[7] = float("nan")
    averaging = SMA(average_ema=0.1, batch_norm="mean")  # the statistics that are not finite are the learner's
    trainer = trainer_of(train_data=(inputs, targets), on_nonfinite="reseed", averaging=averaging)
    result = trainer.fit(max_epochs=3)
    assert trainer.state.num_reseeded > 0
    assert all(value.isfinite().all() for value in result.model.state_dict().values())


@pytest.mark.slow
def test_statistics_of_learning_are_those_of_z() -> None:
    found = []
    for averaging in (SMA(), SMA(average_ema=5.0)):
        recorder = Recorder()
        trainer_of(averaging=averaging, learning_statistics=True, callbacks=[recorder]).fit(max_epochs=2)
        found.append([each.learning for each in recorder.of("epoch")])
    for of_z, with_ema in zip(*found, strict=True):
        assert of_z.sharpness == with_ema.sharpness
        assert of_z.gradient_variance == with_ema.gradient_variance


def test_records_have_the_accuracy_of_the_average_model_itself_beside_that_of_its_ema() -> None:
    found = []
    for horizon in (2.0, None):
        recorder = Recorder()
        averaging = SMA(average_ema=horizon, batch_norm="mean")
        trainer_of(averaging=averaging, callbacks=[recorder]).fit(max_epochs=4)
        found.append(recorder.of("epoch"))
    smoothed, plain = found
    assert [record.z_accuracy for record in smoothed] == [record.test_accuracy for record in plain]
    assert [record.z_accuracy for record in plain] == [None] * 4
