"""Stopping by patience, and the best model: which one is returned and saved, and what survives a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, SMA, Independent, Result, Trainer, UserError
from crossbow_py.telemetry.console import final_lines
from crossbow_py.telemetry.events import EpochRecord
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.checkpoints.weights import load_weights
from crossbow_py.train.evaluation.current_models import current_models
from crossbow_py.train.run_settings import StopConditions
from crossbow_py.train.train_state import TrainState, is_better
from tests.support import linear_model
from tests.trainers import Recorder, blobs, equal_states, image_model, image_trainer, images, make_trainer

PATIENCE = 3


def noise(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with classes that have nothing to do with them: accuracies go up and down."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (num_samples,), generator=generator)
    return images(num_samples)[0], targets


def unsteady(**options: Any) -> Trainer:
    defaults = {"train_data": noise(50, 1), "test_data": noise(40, 2), "optimizer": SGD(learning_rate=0.1)}
    return image_trainer(**{**defaults, **options})


def numbers(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, 4, generator=generator), torch.randn(num_samples, 3, generator=generator)


REGRESSION = {
    "model": linear_model, "loss": nn.functional.mse_loss, "train_data": numbers(40, 1), "test_data": numbers(30, 2),
    "augmentation": None,
}  # fmt: skip


class Watcher(Recorder):
    """Keeps the models after every evaluation."""

    trainer: Trainer

    def __init__(self) -> None:
        super().__init__()
        self.models: list[list[nn.Module]] = []

    def on_epoch(self, record: EpochRecord) -> None:
        super().on_epoch(record)
        self.models.append(current_models(self.trainer.run))


def watched(**options: Any) -> tuple[Trainer, Watcher]:
    watcher = Watcher()
    watcher.trainer = unsteady(callbacks=[watcher], **options)
    return watcher.trainer, watcher


def scores(watcher: Watcher) -> list[float]:
    """By epoch, what is to be as high as it gets."""
    found = []
    for record in watcher.of("epoch"):
        of_validation = record.validation_loss is not None
        accuracy = record.validation_accuracy if of_validation else record.test_accuracy
        loss = record.validation_loss if of_validation else record.test_loss
        found.append(-loss if accuracy is None else accuracy)
    return found


def expected(found: list[float], patience: int) -> tuple[int, int]:
    """(epochs until the stop, epoch of the best until then), counted from one: in words, from the scores alone."""
    best = 0
    for epoch in range(1, len(found)):
        if found[epoch] > found[best]:
            best = epoch
        if epoch - best == patience:
            return epoch + 1, best + 1
    raise AssertionError("these runs are to be unsteady")


def assert_same(ours: Result, models: list[nn.Module]) -> None:
    assert len(ours.models or [ours.model]) == len(models)
    for own, theirs in zip(ours.models or [ours.model], models, strict=True):
        assert equal_states(own, theirs)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"executor": "threads", "averaging": SMA(average_ema=2.0)},
    {"averaging": SMA(batch_norm="recalibrate", recalibration_batches=2)},
    {"averaging": Independent()},
    {"validation_data": noise(30, 3)},
    REGRESSION,
    {"num_learners": 1, "executor": "fused"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS)
def test_run_stops_after_patience_and_returns_the_model_of_the_best_evaluation(options, tmp_path):
    _, long = watched(**options)
    long.trainer.fit(max_epochs=25)
    stop, best = expected(scores(long), PATIENCE)
    trainer = unsteady(output_dir=tmp_path, **options)
    result = trainer.fit(max_epochs=25, patience=PATIENCE)
    assert (result.status, result.stop_reason) == ("finished", "patience")
    assert result.summary.samples_seen == long.of("epoch")[stop - 1].samples_seen
    samples = long.of("epoch")[best - 1].samples_seen
    assert result.summary.model_epoch == samples / trainer.run.num_samples
    assert_same(result, long.models[best - 1])
    saved = image_model() if trainer.run.loss is nn.functional.cross_entropy else linear_model()
    central = trainer.run.rule.has_central_model
    load_weights(saved, tmp_path / ("model.safetensors" if central else "model_0.safetensors"))
    assert equal_states(saved, result.model)
    if "validation_data" not in options and result.test_accuracy is not None:
        assert result.test_accuracy == long.of("epoch")[best - 1].test_accuracy == max(scores(long)[:stop])
    assert read_summary(tmp_path)["model_epoch"] == result.summary.model_epoch


@pytest.mark.slow
def test_restore_best_returns_the_best_of_a_run_that_ends_otherwise_and_evaluate_measures_it():
    trainer, watcher = watched()
    result = trainer.fit(max_epochs=8, restore_best=True)
    best = max(range(8), key=scores(watcher).__getitem__)  # the first of the highest
    assert best < 7 and result.stop_reason == "max_epochs"
    assert_same(result, watcher.models[best])
    assert trainer.evaluate().accuracy == result.test_accuracy == max(scores(watcher))
    assert f"of epoch {result.summary.model_epoch:g}" in "\n".join(final_lines(result.summary))
    # Training goes on from where it was, and returns its last model as if the best had never been restored.
    again, whole = trainer.fit(max_epochs=9), unsteady().fit(max_epochs=9)
    assert_same(again, [whole.model])
    assert again.summary.model_epoch == again.summary.epochs


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"averaging": Independent()}, {"averaging": SMA(average_ema=2.0)}])
def test_resumed_run_counts_on_and_has_the_same_best_model(tmp_path: Path, options):
    whole = unsteady(output_dir=tmp_path / "whole", **options).fit(max_epochs=25, patience=PATIENCE)
    folder, epoch = tmp_path / "parts", 0
    while True:
        epoch += 1
        recorder = Recorder()
        trainer = unsteady(output_dir=folder, resume="auto", callbacks=[recorder], **options)
        parts = trainer.fit(max_epochs=min(epoch, 25), patience=PATIENCE)
        if parts.stop_reason == "patience":
            break
    assert parts.summary.samples_seen == whole.summary.samples_seen
    assert parts.summary.model_epoch == whole.summary.model_epoch
    assert_same(parts, whole.models or [whole.model])
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    seen = trainer.state.samples_seen
    again = unsteady(output_dir=folder, resume="auto", callbacks=[recorder], **options)
    assert again.fit(max_epochs=25, patience=PATIENCE).stop_reason == "patience"
    assert again.state.samples_seen == seen
    assert "Nothing is left to train: the run had reached patience; allow more of it." in recorder.of("message")


def test_best_is_looked_for_from_here_on_where_earlier_models_were_not_kept():
    trainer, watcher = watched()
    trainer.fit(max_epochs=8)
    before = scores(watcher)
    assert before[-1] < max(before)
    result = trainer.fit(max_epochs=12, restore_best=True)
    later = scores(watcher)[7:]  # the eighth model is still there
    assert any("were not kept" in message for message in watcher.of("message"))
    assert_same(result, watcher.models[7 + later.index(max(later))])


def test_model_that_was_the_best_when_the_first_fit_ended_is_kept_without_a_message():
    recorder = Recorder()
    trainer = make_trainer(test_data=blobs(30), optimizer=SGD(learning_rate=0.0), callbacks=[recorder])
    first = trainer.fit(max_epochs=1)
    result = trainer.fit(max_epochs=9, patience=2)
    assert (result.stop_reason, result.summary.epochs, result.summary.model_epoch) == ("patience", 3.0, 1.0)
    assert equal_states(result.model, first.model)
    assert recorder.of("message") == []


def test_stop_inside_an_epoch_is_not_counted_against_patience():
    options = {"test_data": blobs(30), "optimizer": SGD(learning_rate=0.0)}
    trainer = make_trainer(**options)
    for limit in (1.2, 1.4, 1.6, 1.8):
        assert trainer.fit(max_epochs=limit, patience=2).stop_reason == "max_epochs"
    assert trainer.fit(max_epochs=9, patience=2).summary.epochs == 3.0


def test_patience_without_anything_to_evaluate_on_is_refused():
    for stops in ({"patience": 2}, {"restore_best": True}):
        with pytest.raises(UserError, match="patience and restore_best go by evaluations, got neither test_data nor"):
            make_trainer().fit(max_epochs=1, **stops)


def test_restore_best_alone_ends_no_run():
    with pytest.raises(UserError, match=r"needs an end, got none; set one of .* target_loss, patience\."):
        StopConditions(restore_best=True)


@pytest.mark.parametrize(
    ("ours", "best", "better"),
    [
        ((0.5, 9.0), (None, None), True),
        ((0.5, 1.0), (0.5, 2.0), False),  # accuracy decides, and of equal ones the first is the best
        ((0.6, 3.0), (0.5, 2.0), True),
        ((None, 1.0), (None, 2.0), True),
        ((None, 2.0), (None, 2.0), False),
        ((None, math.nan), (None, None), False),
        ((None, 5.0), (None, math.nan), True),
    ],
)
def test_better_is_a_higher_accuracy_or_a_lower_loss_and_never_nan(ours, best, better):
    assert is_better(*ours, *best) is better


def test_stale_evaluations_are_counted_from_the_last_best_one():
    state, stale = TrainState(), []
    for loss in (3.0, math.nan, 2.0, 2.0, 2.5, 1.0):
        state.note_evaluation(None, loss, None)
        stale.append(state.num_stale)
    assert stale == [0, 1, 0, 1, 2, 0]
    assert TrainState.from_plain(state.to_plain()) == state
    stops = StopConditions(patience=2)
    assert [stops.after_evaluation(None, 1.0, count) for count in (1, 2, 3)] == [None, "patience", "patience"]
