"""Targets that cross-entropy ignores: never counted as right or wrong, and without weight in means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import SGD
from crossbow_py.core.errors import DataError
from crossbow_py.data.normalisation import IDENTITY
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.losses import correct_of_batch
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.predict.prediction import Prediction
from crossbow_py.predict.report import as_text
from crossbow_py.train.evaluation.evaluator import Evaluator, evaluate_bank
from crossbow_py.train.run_folder.reporter import example_predictions
from tests.support import feed_of
from tests.thinned import thinned
from tests.trainers import Recorder, make_trainer

# Scores of two classes are the inputs themselves: odds of 3 to 1 for the first, of 1 to 3 for it, and even ones.
YES, NO, EVEN = [np.log(3.0), 0.0], [0.0, np.log(3.0)], [0.0, 0.0]
SURE, WRONG, OPEN = np.log(4 / 3), np.log(4.0), np.log(2.0)  # losses: right at 3 to 1, wrong at that, and at even odds
LOSSES = {
    -100: [nn.functional.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="mean")],
    255: [nn.CrossEntropyLoss(ignore_index=255)],
    1: [nn.CrossEntropyLoss(ignore_index=1)],
}
KINDS = [(ignored, loss) for ignored, losses in LOSSES.items() for loss in losses]


def evaluator(loss: Any, model: nn.Module | None = None) -> Evaluator:
    model = nn.Identity() if model is None else model
    return Evaluator(model, precision=FP32, loss=loss, metrics={}, batch_size=2, channels_last=False)


def two_rows() -> ReplicaBank:
    """Return a bank of a linear model with two rows of different weights."""
    bank = ReplicaBank(nn.Linear(4, 3), 2, device=torch.device("cpu"), precision=FP32, state_names=())
    bank.load_learner(1, nn.Linear(4, 3))
    return bank


@pytest.mark.parametrize(("ignored", "loss"), KINDS)
def test_accuracy_and_loss_of_classes_are_means_over_those_that_count(ignored: int, loss: Any) -> None:
    # Batches of two: one counts of the first, none of the second, two of the third and one of the fourth.
    inputs = torch.tensor([YES, NO, NO, YES, NO, YES, YES], dtype=torch.float32)
    targets = torch.tensor([0, ignored, ignored, ignored, 0, 0, 0])
    found = evaluator(loss).evaluate({}, feed_of(inputs, targets, FP32))
    assert found.accuracy == 3 / 4
    assert found.loss == pytest.approx((3 * SURE + WRONG) / 4, rel=1e-6)
    assert found.num_samples == 7


@pytest.mark.parametrize(("ignored", "loss"), KINDS)
def test_loss_of_masks_is_the_mean_over_pixels_that_count(ignored: int, loss: Any) -> None:
    # Masks [N, 1, 2]: of the first batch one pixel of four counts, of the second all of two.
    rows = [[YES, NO], [NO, NO], [NO, EVEN]]
    inputs = torch.tensor(rows, dtype=torch.float32).permute(0, 2, 1)[:, :, None]
    masks = torch.tensor([[[0, ignored]], [[ignored, ignored]], [[0, 0]]])
    found = evaluator(loss).evaluate({}, feed_of(inputs, masks, FP32))
    assert found.loss == pytest.approx((SURE + WRONG + OPEN) / 3, rel=1e-6)
    assert (found.accuracy, found.num_samples) == (None, 3)


@pytest.mark.parametrize("fused", [True, False])
def test_learners_measured_together_have_the_same_means(fused: bool) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(7, 4), torch.tensor([0, -100, -100, -100, 2, 1, 0])
    bank = two_rows()
    measure = evaluator(nn.functional.cross_entropy, nn.Linear(4, 3))
    found = evaluate_bank(bank, measure, feed_of(inputs, targets, FP32), [0, 1], fused=fused)
    for learner, own in enumerate(found):
        outputs = nn.functional.linear(inputs, *bank.learner_state(learner).values())
        kept = targets != -100
        assert own.accuracy == float((outputs.argmax(1) == targets)[kept].double().mean())
        assert own.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), rel=1e-6)


@pytest.mark.parametrize("fused", [True, False, None])
def test_data_that_the_loss_leaves_out_altogether_are_refused_in_one_line(fused: bool | None) -> None:
    feed = feed_of(torch.randn(4, 4), torch.full((4,), -100), FP32)
    measure = evaluator(nn.functional.cross_entropy, nn.Linear(4, 3))
    bank = two_rows()
    with pytest.raises(DataError, match="the loss leaves out every target of 4 samples .*; give targets that are cla"):
        if fused is None:
            measure.evaluate(measure.template.state_dict(), feed)
        else:
            evaluate_bank(bank, measure, feed, [0, 1], fused=fused)


@pytest.mark.parametrize(("ignored", "loss"), KINDS)
@pytest.mark.parametrize("executor", thinned(["serial", "threads", "fused", "fused_threads"], quick=[1, 2], slow=[3]))
def test_training_accuracy_is_that_of_samples_that_count(executor: str, ignored: int, loss: Any) -> None:
    # Samples are alike, half of them are of the first class, and the others count for nothing.
    recorder, targets = Recorder(), torch.tensor([0, ignored] * 20)
    data = (torch.ones(40, 4), targets)
    trainer = make_trainer(
        model=lambda: nn.Linear(4, 3), train_data=data, test_data=data, loss=loss, executor=executor, batch_size=40,
        num_learners=1, optimizer=SGD(learning_rate=1.0), callbacks=[recorder],
    )  # fmt: skip
    result = trainer.fit(max_epochs=6)
    assert result.test_accuracy == 1
    assert recorder.of("epoch")[-1].train_accuracy == 1


def test_right_predictions_of_a_batch_are_spread_over_it() -> None:
    outputs = torch.tensor([[YES, YES, NO, NO], [YES, YES, YES, NO]])
    targets = torch.tensor([[0, 0, -100, 0], [-100, 1, -100, -100]])
    # Two of three that count, of four samples; and none of one. Without any that is left out, the number itself.
    assert correct_of_batch(outputs, targets, -100, 4, lead=1).tolist() == [2 * 4 / 3, 0.0]
    assert correct_of_batch(outputs, targets.clamp(min=0), -100, 4, lead=1).tolist() == [2.0, 2.0]


def test_pictures_show_samples_that_are_of_a_class() -> None:
    targets = torch.tensor([0, -100, 1, -100])
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    measure = evaluator(nn.functional.cross_entropy, model)
    found = measure.evaluate(model.state_dict(), feed_of(torch.randn(4, 1, 2, 2), targets, FP32), examples=True)
    shown = example_predictions(found.examples, IDENTITY)
    assert shown is not None
    assert (shown.targets, len(shown.images), len(shown.predicted)) == ((0, 1), 2, 2)


def test_prediction_counts_samples_that_are_of_a_class_and_says_so() -> None:
    probabilities = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]], np.float32)
    found = Prediction(
        config=cast(Any, None), models=cast(Any, (SimpleNamespace(name="mine"),)), data="own",
        probabilities=probabilities, targets=np.array([0, -100, 0, -100]), device="cpu", precision="fp32",
        executor="serial", num_architectures=1, batch_size=2, images_per_s=1.0, latencies={}, notes=(),
    )  # fmt: skip
    assert (found.accuracies, found.accuracy) == ([0.5], 0.5)
    assert "2 of 4 samples have the target -100, which is no class: accuracy is that of the others." in as_text(found)


def test_class_that_bytes_cannot_tell_from_an_ignored_one_counts():
    inputs = torch.eye(200)[150:170]
    targets = torch.arange(150, 170, dtype=torch.uint8)  # 156 is -100 among bytes
    for executor in ("serial", "fused"):
        result = make_trainer(
            model=lambda: nn.Linear(200, 200), train_data=(inputs, targets), test_data=(inputs, targets),
            executor=executor, num_classes=200, batch_size=1, callbacks=[recorder := Recorder()],
        ).fit(max_epochs=1)  # fmt: skip
        assert 0 <= result.test_accuracy <= 1
        assert all(record.train_accuracy <= 1 for record in recorder.of("epoch"))
