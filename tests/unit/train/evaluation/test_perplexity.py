"""The perplexity of tokens: exp of the mean loss over those that count, and where there is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crossbow_py.distributed.ranks import Ranks
from tests.support import feed_of
from tests.thread_ranks import on_threads
from tests.unit.train.evaluation.test_metrics import Tokens, evaluator_of

T, V = 5, 3


def tokens() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, and ids and targets [10, T], of which a batch of four has few that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (10, T), generator=generator)
    targets = torch.randint(V, (10, T), generator=generator)
    targets[3:, 2:] = -100
    targets[4:8, 1:] = -100
    return Tokens().double(), ids, targets


def surprise(model: nn.Module, ids: Tensor, targets: Tensor) -> float:
    """The mean of -log p over the tokens that count, in NumPy."""
    scores = model(ids).detach().numpy().reshape(-1, V)
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    kept = targets.flatten().numpy() >= 0
    return float(-log_p[kept, targets.flatten().numpy()[kept]].mean())


def measure(model: nn.Module, ids: Tensor, targets: Tensor, ranks: Ranks, loss: Any) -> dict[str, float]:
    evaluator = evaluator_of(model, {}, loss=loss)
    return evaluator.evaluate(model.state_dict(), feed_of(ids, targets), ranks).metrics


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_perplexity_is_of_all_tokens_that_count_over_unequal_batches_and_ranks(loss: Any, num_ranks: int) -> None:
    model, ids, targets = tokens()
    found = on_threads(lambda ranks: measure(model, ids, targets, ranks, loss), num_ranks)
    assert found == [{"perplexity": pytest.approx(math.exp(surprise(model, ids, targets)), rel=1e-12)}] * num_ranks


class Flat(nn.Module):
    """One class a sample, of the first token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.model(ids)[:, 0]
        return scores


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.ones(V).double()),
        lambda outputs, targets: nn.functional.cross_entropy(outputs.movedim(-1, 1), targets),
    ],
)
def test_loss_that_is_no_plain_cross_entropy_of_tokens_has_no_perplexity(loss: Any) -> None:
    model, ids, targets = tokens()
    assert measure(model, ids, targets, Ranks(), loss) == {}
    assert evaluator_of(model, {}, loss=loss).metric_names(feed_of(ids, targets)) == ()


def test_classes_of_samples_have_no_perplexity() -> None:
    model, ids, targets = tokens()
    flat, first = Flat(model), targets[:, 0].clamp(min=0)
    assert measure(flat, ids, first, Ranks(), nn.functional.cross_entropy) == {}
    assert evaluator_of(flat, {}).metric_names(feed_of(ids, first)) == ()
    assert evaluator_of(model, {"more": nn.L1Loss()}).metric_names(feed_of(ids, targets)) == ("perplexity", "more")


def test_perplexity_beyond_all_numbers_is_infinite() -> None:
    model, ids, targets = tokens()
    with torch.no_grad():
        model.scores.weight[:] = torch.tensor([0.0, 0.0, 1e5])  # type: ignore[union-attr]
    found = measure(model, ids, 0 * targets.clamp(min=0), Ranks(), nn.functional.cross_entropy)
    assert found == {"perplexity": math.inf}
