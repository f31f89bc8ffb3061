"""The metrics of torchmetrics itself, where it is installed, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import UserError
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.train.evaluation.metrics import checked_metrics
from tests.state_metrics import area_under_curve, f1_scores
from tests.thread_ranks import on_threads
from tests.trainers import image_trainer
from tests.unit.train.evaluation.test_metrics import measured, outputs_of, two_classes

torchmetrics = pytest.importorskip("torchmetrics")
classification = torchmetrics.classification


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # the fourth rank has no batch of its own
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metrics_of_torchmetrics_are_of_the_whole_evaluation(num_ranks: int) -> None:
    model, targets = two_classes()
    metrics = {
        "f1": classification.MulticlassF1Score(num_classes=2, average="macro"),
        "each": classification.MulticlassF1Score(num_classes=2, average=None),
        "roc": classification.MulticlassAUROC(num_classes=2, average=None),
        "iou": classification.MulticlassJaccardIndex(num_classes=2),
        "all": torchmetrics.MetricCollection(
            [classification.MulticlassPrecision(num_classes=2), classification.MulticlassRecall(num_classes=2)]
        ),
    }
    metrics = checked_metrics(metrics, num_ranks)
    found = on_threads(lambda ranks: measured(model, metrics, ranks, targets=targets), num_ranks)
    outputs, labels = outputs_of(model), targets.numpy()
    predicted, each = outputs.argmax(1), f1_scores(outputs, labels)
    precision = [(labels[predicted == own] == own).mean() for own in (0, 1)]
    recall = [(predicted[labels == own] == own).mean() for own in (0, 1)]
    assert found[0] == pytest.approx(
        {
            "f1": each.mean(), "each/0": each[0], "each/1": each[1],
            "roc/1": area_under_curve(outputs[:, 1] - outputs[:, 0], labels),
            "roc/0": area_under_curve(outputs[:, 0] - outputs[:, 1], (labels == 0).astype(int)),
            "iou": np.mean(each / (2 - each)),
            "all/MulticlassPrecision": np.mean(precision), "all/MulticlassRecall": np.mean(recall),
        },
        rel=1e-6,
    )  # fmt: skip
    assert found == [found[0]] * num_ranks


def test_tokens_are_left_to_a_metric_of_torchmetrics_as_samples() -> None:
    ids = torch.randint(7, (10, 5), generator=torch.Generator().manual_seed(0))
    targets = (ids % 3).masked_fill(torch.arange(5) > 2, -100)
    model = nn.Embedding(7, 3).double()
    metrics = {"right": classification.MulticlassAccuracy(num_classes=3, average="micro")}
    found = measured(model, metrics, Ranks(), inputs=ids, targets=targets)
    right = (model(ids).argmax(2) == targets)[:, :3].float().mean().item()
    assert found["right"] == pytest.approx(right)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MulticlassConfusionMatrix", "must compute a number, a vector of them or a mapping, got a tensor of shape"),
        ("MulticlassROC", "must compute a number, a vector of them or a mapping, got ("),
        ("MultilabelF1Score", "cannot take the model's output [2, 3] with targets [2]"),
    ],
)
def test_metric_of_torchmetrics_for_something_else_is_refused(name: str, said: str) -> None:
    size = {"num_labels" if name.startswith("Multilabel") else "num_classes": 3}
    with pytest.raises(UserError) as error:
        image_trainer(metrics={"m": getattr(classification, name)(**size)})
    assert said in str(error.value)


def test_metric_of_torchmetrics_that_ranks_cannot_share_is_refused() -> None:
    for metric, said in (
        (torchmetrics.PearsonCorrCoef(), "has the state mean_x, which cannot be put together over ranks by None"),
        (torchmetrics.ClasswiseWrapper(classification.MulticlassF1Score(num_classes=3, average=None)), "other metrics"),
    ):
        with pytest.raises(UserError) as error:
            checked_metrics({"m": metric}, 2)
        assert said in str(error.value)
