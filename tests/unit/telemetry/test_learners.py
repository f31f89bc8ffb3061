"""The table of independent learners, and which of them is the best."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import pytest
from torch import nn

from crossbow_py import SGD, Independent, UserError
from crossbow_py.report.page import as_html
from crossbow_py.report.reading import read_runs
from crossbow_py.telemetry.console import epoch_line, final_lines
from crossbow_py.telemetry.learners import LearnerFigures, learner_table, with_best
from tests.trainers import blobs, make_trainer


def of(which: str, *pairs: tuple[float | None, float]) -> list[LearnerFigures]:
    return [LearnerFigures(**{f"{which}_accuracy": accuracy, f"{which}_loss": loss}) for accuracy, loss in pairs]


@pytest.mark.parametrize(
    ("learners", "best"),
    [
        (of("test", (0.5, 0.1), (0.9, 0.3)), 1),
        (of("test", (0.9, 0.3), (0.9, 0.1), (0.9, 0.2)), 1),
        (of("test", (None, 0.3), (None, math.nan), (None, 0.2)), 2),
        (of("test", (0.1, math.inf), (0.1, math.nan)), None),
        ([LearnerFigures(validation_loss=loss, test_loss=-loss) for loss in (0.1, 0.2)], 0),
    ],
    ids=["accuracy", "loss between equals", "loss without classes", "none is finite", "validation before test"],
)
def test_best_learner_has_the_highest_accuracy_or_the_lowest_loss(learners: Any, best: int | None) -> None:
    assert [each.is_best for each in with_best(learners)] == [place == best for place in range(len(learners))]


def test_run_says_what_each_learner_had_and_how_good_its_own_model_is(tmp_path: Any) -> None:
    x, y = blobs(30)
    rates = SGD(learning_rate=(1e-4, 0.05), momentum=0.5)
    trainer = make_trainer(averaging=Independent(), optimizer=rates, test_data=(x, y), output_dir=tmp_path)
    result = trainer.fit(max_epochs=1)
    first, second = result.summary.learners or ()
    losses = [nn.functional.cross_entropy(model(x), y).item() for model in result.models]
    assert [first.test_loss, second.test_loss] == pytest.approx(losses, rel=1e-5)
    assert (first.settings, second.settings) == ({"learning_rate": 1e-4}, {"learning_rate": 0.05})
    assert (first.is_best, second.is_best) == (False, True)
    assert repr(result).endswith("best of 2 learners: models[1], learning_rate 0.05")
    lines = "\n".join(final_lines(result.summary))
    assert "learner  learning_rate  test accuracy  test loss" in lines
    assert f"* 1               0.05  {second.test_accuracy:13.4f}" in lines
    page = as_html(read_runs([tmp_path]), [], datetime(2026, 1, 2))
    assert "<h2>The learners</h2>" in page and f"<td>* 1</td><td>0.05</td><td>{second.test_accuracy:.4f}</td>" in page
    assert learner_table(result.summary.learners or ()).count("\n") == 3
    assert make_trainer(test_data=(x, y)).fit(max_epochs=1).summary.learners is None


def test_best_of_returned_models_is_by_the_validation_data_of_their_epoch() -> None:
    x, y = blobs(30)
    trainer = make_trainer(
        averaging=Independent(), optimizer=SGD(learning_rate=(0.01, 0.05)), validation_data=(x, y), test_data=blobs(9)
    )
    result = trainer.fit(max_epochs=3, patience=9)
    for model, each in zip(result.models, result.summary.learners or (), strict=True):
        assert each.validation_loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)
        assert each.test_loss != each.validation_loss


def test_epoch_line_of_learners_without_classes_has_their_losses(events: Any) -> None:
    line = epoch_line(events.epoch_record(1, learner_accuracy=(None, None), learner_loss=(0.5, 0.75)), "4")
    assert "learners 0.5000 0.7500" in line


def test_list_of_optimizers_names_lists_of_rates_and_train_many() -> None:
    with pytest.raises(UserError, match=r"SGD\(learning_rate=\[0.01, 0.1\]\), or give models .* train_many"):
        make_trainer(optimizer=[SGD(), SGD()])
