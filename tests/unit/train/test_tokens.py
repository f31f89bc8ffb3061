"""Scores and classes of tokens: each token counts as a sample to the loss, the accuracy and the evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow_py import SGD, Collated, Independent, Listener, Trainer
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.data.sampler import epoch_order
from crossbow_py.telemetry.console import final_lines
from crossbow_py.telemetry.events import EpochRecord
from tests.thinned import pairs, thinned

SAMPLES, TOKENS, WORDS, BATCH = 40, 6, 9, 4
EXECUTORS = ["serial", "threads", "fused", "fused_threads"]


class PerToken(nn.Module):
    """Scores [B, T, V] of what follows each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(ids).cumsum(1).tanh())
        return scores


def sentences(ignores: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
    targets = (ids + 1) % WORDS
    if ignores:  # as padding is
        targets[torch.arange(TOKENS) >= torch.randint(2, TOKENS + 1, (SAMPLES, 1), generator=generator)] = -100
    return ids, targets


def flat_loss(scores: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


def plain(data: tuple[Tensor, Tensor], rounds: int, smoothing: float) -> nn.Module:
    """The loop of plain PyTorch over what two learners take, whose gradients are averaged."""
    torch.manual_seed(1)
    model = PerToken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    order = torch.cat([torch.from_numpy(epoch_order(1, epoch, SAMPLES)) for epoch in range(2)])
    for taken in order[: rounds * 2 * BATCH].split(2 * BATCH):
        optimizer.zero_grad()
        for own in taken.split(BATCH):
            (flat_loss(model(data[0][own]), data[1][own], smoothing) / 2).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("executor", "ignores", "smoothing"), pairs(list(EXECUTORS), [False, True], [0.0, 0.2], quick=4)
)
def test_tokens_train_as_in_a_plain_loop(executor: str, ignores: bool, smoothing: float) -> None:
    data = sentences(ignores)
    trainer = Trainer(
        model=PerToken, train_data=data, test_data=data, batch_size=BATCH, num_learners=2, averaging=SynchronousSGD(),
        optimizer=SGD(learning_rate=0.5, momentum=0.9), executor=executor, device="cpu", precision="fp32", seed=1,
        label_smoothing=smoothing,
    )  # fmt: skip
    result, expected = trainer.fit(max_rounds=8), plain(data, 8, smoothing)
    for found, own in zip(result.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        scores, counted = expected(data[0]), data[1] != -100
    measured = trainer.evaluate()
    assert measured.loss == pytest.approx(flat_loss(scores, data[1]).item(), rel=1e-4)
    right = (scores.argmax(-1) == data[1])[counted]
    assert measured.accuracy == pytest.approx(right.double().mean().item(), abs=1e-9)


def test_tokens_of_independent_learners_are_counted_alike() -> None:
    data = sentences(ignores=True)
    options = {"batch_size": BATCH, "num_learners": 2, "averaging": Independent(), "device": "cpu", "precision": "fp32"}
    by_executor = []
    for executor in ("serial", "fused"):
        trainer = Trainer(model=PerToken, train_data=data, test_data=data, executor=executor, **options)
        summary = trainer.fit(max_epochs=1).summary
        by_executor.append([*summary.learner_test_accuracy, summary.test_loss])
    assert by_executor[0] == pytest.approx(by_executor[1], rel=1e-5)


def test_training_accuracy_is_that_of_the_tokens() -> None:
    data = sentences(ignores=False)
    records = []

    class Kept(Listener):
        def on_epoch(self, record: EpochRecord) -> None:
            records.append(record)

    trainer = Trainer(
        model=PerToken, train_data=data, batch_size=SAMPLES, num_learners=1, executor="serial", device="cpu",
        precision="fp32", seed=1, callbacks=[Kept()],
    )  # fmt: skip
    summary = trainer.fit(max_epochs=1).summary
    torch.manual_seed(1)
    expected = (PerToken()(data[0]).argmax(-1) == data[1]).double().mean().item()  # of the initial weights
    assert records[0].train_accuracy == pytest.approx(expected, abs=1e-9)
    assert records[0].tokens_per_s == pytest.approx(TOKENS * records[0].images_per_s)
    assert summary.tokens_per_s == pytest.approx(TOKENS * summary.images_per_s)
    assert f"{summary.tokens_per_s:,.0f} tokens/s" in "".join(final_lines(summary))


@pytest.mark.parametrize("targets", [torch.zeros(SAMPLES, dtype=torch.int64), torch.zeros(SAMPLES, TOKENS)])
def test_only_samples_of_tokens_have_tokens_a_second(targets: Tensor) -> None:
    loss = nn.MSELoss() if targets.is_floating_point() else None
    trainer = Trainer(
        model=lambda: nn.Linear(TOKENS, TOKENS), train_data=(torch.zeros(SAMPLES, TOKENS), targets), loss=loss,
        batch_size=BATCH, num_learners=1, executor="serial", device="cpu", precision="fp32",
    )  # fmt: skip
    assert trainer.fit(max_rounds=1).summary.tokens_per_s is None


class Reads(nn.Module):
    """Scores [B, T, V] of as many tokens as it is given."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_words, 16), nn.Linear(16, num_words)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(ids))
        return scores


@pytest.mark.parametrize("length", thinned([7, 8, 9], quick=[1], slow=[0, 2]))
@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(ignore_index=0), partial(F.cross_entropy, ignore_index=0)])
def test_as_many_tokens_as_classes_are_tokens_all_the_same(length: int, loss: Any) -> None:
    ids = torch.randint(1, 8, (64, length), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=lambda: Reads(8), train_data=(ids, ids), test_data=(ids, ids), loss=loss, batch_size=8, num_learners=2,
        optimizer=SGD(learning_rate=2.0), executor="serial", device="cpu", precision="fp32",
    )  # fmt: skip
    result = trainer.fit(max_epochs=12)
    assert result.test_accuracy == 1.0
    assert result.summary.tokens_per_s is not None and "perplexity" in result.summary.metrics


def padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return ids, nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-100)


def test_batches_of_every_length_mean_the_same() -> None:
    """As evaluated in one batch of all, also where a batch is as long as there are classes."""
    draw = torch.Generator().manual_seed(0)
    items = [torch.randint(1, 8, (5 + index % 6,), generator=draw) for index in range(24)]
    metrics = {"same": F.cross_entropy}
    trainer = Trainer(
        model=lambda: Reads(8), train_data=Collated(items, padded), test_data=Collated(items, padded), metrics=metrics,
        batch_size=2, num_learners=2, executor="serial", device="cpu", precision="fp32", num_workers=0,
    )  # fmt: skip
    trainer.fit(max_epochs=1)
    model, found = trainer.model, []
    with torch.no_grad():
        for size in (3, 24):
            trainer.run.evaluator.batch_size = size
            found.append(trainer.evaluate())
        ids, targets = padded(items)
        expected = flat_loss(model(ids), targets).item()
    for one in found:
        assert one.loss == pytest.approx(expected, rel=1e-5)
    assert found[0].accuracy == pytest.approx(found[1].accuracy)


def test_losses_with_weights_are_means_over_all_weights_whatever_the_batches() -> None:
    inputs, targets = torch.randn(50, 4), torch.arange(50) // 40  # sorted by class
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0]))
    trainer = Trainer(
        model=lambda: nn.Linear(4, 2), train_data=(inputs, targets), test_data=(inputs, targets), loss=loss,
        batch_size=5, num_learners=1, executor="serial", device="cpu", precision="fp32",
    )  # fmt: skip
    trainer.fit(max_rounds=2)
    with torch.no_grad():
        expected = loss(trainer.model(inputs), targets).item()
    for size in (7, 50):
        trainer.run.evaluator.batch_size = size
        assert trainer.evaluate().loss == pytest.approx(expected, rel=1e-5)


class Tags(Reads):
    """Computes its loss of labels, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(ids)
        return {"logits": scores, "loss": None if labels is None else flat_loss(scores, labels)}


def test_labels_that_count_weigh_alike_in_the_loss_of_a_model() -> None:
    ids = torch.randint(1, 8, (16, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(6) >= torch.tensor([6] * 8 + [1] * 8)[:, None], -100)
    data = {"ids": ids, "labels": labels}
    models = []
    for size, parts in ((16, 1), (4, 4)):
        trainer = Trainer(
            model=lambda: Tags(8), train_data=data, test_data=data, batch_size=size, accumulate=parts, num_learners=1,
            optimizer=SGD(learning_rate=1.0, momentum=0.0), executor="serial", device="cpu", precision="fp32",
        )  # fmt: skip
        models.append(trainer.fit(max_rounds=1).model)
        trainer.run.evaluator.batch_size = size
        assert trainer.evaluate().loss == pytest.approx(float(models[-1](ids, labels)["loss"].detach()), rel=1e-5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_micro_batches_of_classes_without_weight_add_nothing() -> None:
    inputs, targets = torch.randn(16, 4), torch.tensor([0, 1] * 8)
    for executor in EXECUTORS:
        trainer = Trainer(
            model=lambda: nn.Linear(4, 2), train_data=(inputs, targets), batch_size=1, accumulate=8, num_learners=2,
            loss=nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0])), executor=executor, device="cpu",
            precision="fp32",
        )  # fmt: skip
        assert torch.cat([own.flatten() for own in trainer.fit(max_rounds=3).model.parameters()]).isfinite().all()
