"""Confusion matrices of evaluations against counts in NumPy: batches, ranks, ignored targets, masks, several models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crossbow_py import Independent, Result
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.train.evaluation.evaluator import MOST_CLASSES, Evaluator, evaluate_bank, mean_evaluation
from tests.support import features, feed_of, linear_model
from tests.thread_ranks import on_threads
from tests.trainers import Recorder, image_trainer
from tests.unit.train.evaluation.test_evaluator import make_bank
from tests.unit.train.evaluation.test_metrics import Tokens, evaluator_of

INPUTS, TARGETS = features(10)


def counted(model: nn.Module, inputs: Tensor, targets: Tensor, ranks: Ranks = ALONE, **options: Any) -> Any:
    evaluator = evaluator_of(model, {}, counts_classes=True, **options)
    return evaluator.evaluate(model.state_dict(), feed_of(inputs, targets), ranks).class_counts


def reference(scores: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> list[list[int]]:
    """Scores [N, C] and targets [N], one by one."""
    num_classes = scores.shape[1]
    found = np.zeros((num_classes, num_classes + 1), dtype=int)
    for row, target in zip(scores, targets, strict=True):
        if 0 <= target < num_classes:
            found[target, row.argmax() if np.isfinite(row.max()) else num_classes] += 1
    return found.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_matrix_is_that_of_all_samples_that_count_over_batches_and_ranks(num_ranks: int, ignored: int) -> None:
    model = linear_model().double()
    targets = TARGETS.clone()
    targets[[2, 9]] = ignored
    inputs = INPUTS.clone()
    inputs[int((targets == 0).nonzero()[0])] = torch.nan
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    found = on_threads(lambda ranks: counted(model, inputs, targets, ranks, loss=loss, class_names=("a",)), num_ranks)
    expected = reference(model(inputs.double()).detach().numpy(), targets.where(targets != ignored, -1).numpy())
    for own in found:
        assert (own.counts.tolist(), own.names, own.of_positions) == (expected, ("a", "1", "2"), False)
    assert sum(row[-1] for row in expected) == 1


class Masks(nn.Module):
    """Scores [B, 3, H, W] of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(1, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images)


def test_masks_count_their_pixels() -> None:
    model = Masks().double()
    images = torch.randn(10, 1, 4, 5)
    targets = torch.randint(3, (10, 4, 5))
    targets[:, 0] = -100
    found = counted(model, images, targets)
    scores = model(images.double()).detach().movedim(1, -1).reshape(-1, 3).numpy()
    assert found.counts.tolist() == reference(scores, targets.flatten().numpy())
    assert found.of_positions
    one = found.counts[0]
    assert found.figures()[0].iou == pytest.approx(one[0] / (one.sum() + found.counts[1:, 0].sum()))


def test_tokens_are_counted_as_samples_if_their_classes_have_names() -> None:
    ids = torch.randint(7, (10, 5), generator=torch.Generator().manual_seed(0))
    targets = (ids % 3).masked_fill(torch.arange(5) > 2, -100)
    model = Tokens().double()
    assert counted(model, ids, targets) is None
    found = counted(model, ids, targets, class_names=("none", "person", "place"))
    assert found.counts.tolist() == reference(model(ids).detach().reshape(-1, 3).numpy(), targets.flatten().numpy())
    assert not found.of_positions


def test_what_has_no_classes_or_too_many_of_them_has_no_matrix() -> None:
    targets = torch.zeros(10, dtype=torch.int64)
    many = nn.Linear(4, MOST_CLASSES + 1).double()
    assert counted(many, INPUTS, targets) is None
    single = nn.Linear(4, 1).double()
    assert counted(single, INPUTS, torch.randn(10, 1).double(), loss=nn.functional.mse_loss) is None
    of_anything = Masks().double()
    loss = lambda outputs, targets: outputs.mean()  # noqa: E731
    assert counted(of_anything, torch.randn(10, 1, 4, 5), torch.zeros(10, 4, 5, dtype=torch.int64), loss=loss) is None
    evaluator = evaluator_of(linear_model().double(), {})
    assert evaluator.evaluate(linear_model().double().state_dict(), feed_of(INPUTS, TARGETS)).class_counts is None


def test_a_thousand_classes_have_one() -> None:
    model = nn.Linear(4, MOST_CLASSES).double()
    targets = torch.arange(10) * 111
    found = counted(model, INPUTS, targets)
    assert found.counts.tolist() == reference(model(INPUTS.double()).detach().numpy(), targets.numpy())


@pytest.mark.parametrize("fused", [False, True])
def test_each_model_of_a_bank_has_its_own_matrix_and_their_mean_evaluation_the_sum(fused: bool) -> None:
    bank = make_bank(linear_model)
    evaluator = Evaluator(
        bank.template, precision=FP64, loss=nn.functional.cross_entropy, metrics={}, batch_size=4, counts_classes=True
    )
    found = evaluate_bank(bank, evaluator, feed_of(INPUTS, TARGETS), [0, 1, 2], fused=fused)
    each = [reference(bank.module(row)(INPUTS.double()).detach().numpy(), TARGETS.numpy()) for row in range(3)]
    assert [own(one).counts.tolist() for one in found] == each
    assert own(mean_evaluation(found)).counts.tolist() == np.sum(each, 0).tolist()


def own(evaluation: Any) -> ClassCounts:
    assert evaluation.class_counts is not None
    found: ClassCounts = evaluation.class_counts
    return found


class Heard(Recorder):
    """Keeps matrices, too."""

    def on_class_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        self.calls.append(("class counts", (which, samples_seen, int(counts.counts.sum()))))


def trained(**options: Any) -> tuple[Result, Heard]:
    heard = Heard()
    return image_trainer(callbacks=[heard], **options).fit(max_epochs=3), heard


def test_run_shows_matrices_at_growing_intervals_and_at_its_end_each_once() -> None:
    result, heard = trained(num_learners=2)
    size = result.summary.per_class
    assert size is not None and sum(each.support for each in size) == 20
    found = heard.of("class counts")
    assert {which for which, _, _ in found} == {"test"} and {count for *_, count in found} == {20}
    assert len({samples for _, samples, _ in found}) == len(found) and found[-1][1] == result.summary.samples_seen
    mean = sum(each.support * (each.recall or 0) for each in size) / 20
    assert mean == pytest.approx(result.test_accuracy)


def test_run_with_validation_data_shows_that_of_the_test_data_at_its_end() -> None:
    images, targets = image_trainer().run.data.test
    result, heard = trained(validation_data=(images[:9], targets[:9]))
    found = heard.of("class counts")
    assert [(which, count) for which, _, count in found[-2:]] == [("validation", 9), ("test", 20)]
    assert {which for which, _, _ in found[:-1]} == {"validation"}
    assert sum(each.support for each in result.summary.per_class or ()) == 20


def test_independent_learners_are_counted_together() -> None:
    result, _ = trained(num_learners=2, averaging=Independent())
    found = result.summary.per_class or ()
    assert sum(each.support for each in found) == 2 * 20
    assert sum(each.support * (each.recall or 0) for each in found) / 40 == pytest.approx(result.test_accuracy)
