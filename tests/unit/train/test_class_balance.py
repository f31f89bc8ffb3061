"""Classes that are not equally frequent: balanced sampling, weights of samples, and weights of classes in the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import SGD, UserError
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.data.class_balance import weighted_loss
from crossbow_py.data.sampler import weighted_order
from crossbow_py.errors import CheckpointError
from crossbow_py.search import build
from crossbow_py.search.__main__ import main as search
from tests.support import linear_model
from tests.trainers import blobs, image_trainer, images, make_trainer, weights

PLAIN = {"num_learners": 1, "optimizer": SGD(learning_rate=0.05, momentum=0.0)}


def rare(num_samples: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Blobs of which class 0 has all but eight."""
    inputs, targets = blobs(num_samples)
    kept = targets.clone()
    kept[8:] = 0
    return inputs, kept


def plain_loop(ids: list[int], loss: nn.Module) -> nn.Module:
    """SGD over the rare blobs in that order, batches of 4."""
    model, (inputs, targets) = linear_model(), rare()
    reference = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in torch.tensor(ids).split(4):
        reference.zero_grad()
        loss(model(inputs[batch]), targets[batch]).backward()
        reference.step()
    return model


def assert_close(ours: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_balanced_run_equals_a_plain_loop_over_draws_by_one_over_the_class_count(own: bool) -> None:
    targets = rare()[1]
    per_sample = 1.0 / torch.bincount(targets)[targets].double()
    options: dict[str, Any] = {"sample_weights": per_sample} if own else {"sampling": "balanced"}
    result = make_trainer(train_data=rare(), **options, **PLAIN).fit(max_epochs=2)
    ids = np.concatenate([weighted_order(0, epoch, per_sample.numpy()) for epoch in (0, 1)])
    assert result.summary.samples_seen == len(ids) == 80  # an epoch stays as long as it was
    assert_close(result.model, plain_loop(ids.tolist(), nn.CrossEntropyLoss()))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_balanced_run_resumes_to_the_bit(tmp_path: Any, executor: str) -> None:
    inputs, targets = images(50)
    options = {"train_data": (inputs, targets * (torch.arange(50) < 15)), "sampling": "balanced", "executor": executor}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    image_trainer(output_dir=whole, **options).fit(max_epochs=3)
    image_trainer(output_dir=parts, **options).fit(max_rounds=9)
    image_trainer(output_dir=parts, resume="auto", **options).fit(max_epochs=3)
    assert weights(parts) == weights(whole)


def test_resume_with_other_weights_is_refused(tmp_path: Any) -> None:
    make_trainer(output_dir=tmp_path, sample_weights=torch.ones(40)).fit(max_epochs=1)
    make_trainer(output_dir=tmp_path, sample_weights=torch.ones(40), resume="auto").fit(max_epochs=2)
    for options in ({"sample_weights": torch.arange(40)}, {}, {"sampling": "balanced"}):
        with pytest.raises(CheckpointError, match="is of another run"):
            make_trainer(output_dir=tmp_path, resume="auto", **options)


@pytest.mark.parametrize("given", [(0.5, 2.0, 4.0), "balanced"])
@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_class_weights_train_as_torch_does_and_evaluations_leave_them_out(given: Any, executor: str) -> None:
    # 40 samples: 35 of class 0 (32 and three of the first eight), 3 of class 1, 2 of class 2.
    assert torch.bincount(rare()[1]).tolist() == [35, 3, 2]
    used = torch.tensor([0.5, 2.0, 4.0] if given != "balanced" else [40 / (3 * 35), 40 / (3 * 3), 40 / (3 * 2)])
    options = {"train_data": rare(), "test_data": blobs(30), "executor": executor, **PLAIN}
    trainer = make_trainer(class_weights=given, **options)
    result = trainer.fit(max_epochs=2)
    order = [int(each) for n in range(20) for each in _ids_of(trainer, 4 * n)]
    assert_close(result.model, plain_loop(order, nn.CrossEntropyLoss(used)))
    inputs, targets = blobs(30)
    plain = nn.functional.cross_entropy(result.model(inputs), targets).item()
    assert result.summary.test_loss == pytest.approx(plain, rel=1e-5)


def _ids_of(trainer: Any, start: int) -> list[int]:
    inputs = rare()[0]
    return [int((inputs == row).all(1).nonzero()) for row in trainer.run.train_feed.batch(start).inputs]


@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_class_weights_of_several_learners_are_the_same_on_every_executor(executor: str) -> None:
    options = {"train_data": rare(), "class_weights": (0.5, 2.0, 4.0), "averaging": SynchronousSGD()}
    reference = make_trainer(**options).fit(max_epochs=2)
    assert_close(make_trainer(executor=executor, **options).fit(max_epochs=2).model, reference.model)


def test_balanced_weights_of_a_class_without_samples_are_one() -> None:
    loss = weighted_loss("balanced", np.array([0, 0, 0, 2, -100]), 4)
    assert loss.weight.tolist() == pytest.approx([4 / (4 * 3), 1.0, 1.0, 1.0])


class Silent:
    """A data set that does not tell its classes."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return blobs(40)[0][index], 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weights": torch.ones(39)}, r"one number for each of the 40 training samples, got the shape \[39\]"),
        ({"sample_weights": -torch.ones(40)}, "must be finite, not negative and not all 0"),
        ({"sample_weights": torch.zeros(40)}, "must be finite, not negative and not all 0"),
        ({"sample_weights": "balanced"}, "sample_weights must be numbers, one a sample, got str"),
        ({"sample_weights": torch.ones(40), "sampling": "balanced"}, "sampling=balanced both say how samples"),
        ({"sampling": "balanced", "train_data": Silent()}, "the training data do not tell them; give the data set an"),
        ({"class_weights": "balanced", "train_data": Silent()}, "class_weights=balanced needs the class of every"),
        ({"sampling": "random"}, "sampling must be one of shuffle, balanced, got 'random'"),
        ({"class_weights": (1.0, 2.0)}, "one number for each of the model's 3 classes, got 2; give as many"),
        ({"class_weights": (1.0, 0.0, 1.0)}, "class_weights must be greater than 0"),
        ({"class_weights": "inverse"}, "class_weights must be one of|class_weights must be balanced"),
        ({"class_weights": "balanced", "label_smoothing": 0.1}, r"class_weights and label_smoothing=0\.1 do not go"),
        ({"class_weights": "balanced", "loss": nn.NLLLoss()}, "class_weights are for cross-entropy, and another loss"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(**options)


@pytest.mark.slow
def test_batches_of_a_searchs_trials_are_drawn_in_balance(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    new_feed = build.new_feed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "new_feed", lambda *args, **own: made.append(new_feed(*args, **own)) or made[-1])
    words = ["+experiment=search_digits", "+debug=search_fast", "sampling=balanced", "output_dir=found", "device=cpu"]
    assert search(words) == 0
    training, validation, test = made
    counts = torch.bincount(training._targets)
    expected = weighted_order(0, 0, (1.0 / counts[training._targets].double()).numpy())
    batch = training.with_batch_size(64).batch(0)
    assert batch.targets.tolist() == training._targets[expected[:64]].tolist()
    assert validation._order.weights is None and test._order.weights is None
