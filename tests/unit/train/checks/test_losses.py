"""Losses: the default in other forms, parameters that nothing trains, and misfits that torch does not report."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.core.errors import UserError
from crossbow_py.train.checks.losses import misfit, remarks, remarks_on_targets, settled_loss, untrained
from tests.trainers import blobs, make_trainer

F = nn.functional


def own_loss(outputs, targets):
    return (outputs - targets).square().mean()


def test_cross_entropy_as_a_module_is_the_function_unless_something_is_set():
    assert settled_loss(nn.CrossEntropyLoss()) is F.cross_entropy
    for option in ({"weight": torch.ones(3)}, {"label_smoothing": 0.1}, {"ignore_index": 0}, {"reduction": "sum"}):
        loss = nn.CrossEntropyLoss(**option)
        assert settled_loss(loss) is loss
    assert settled_loss(own_loss) is own_loss


def test_parameter_of_a_loss_is_found_where_there_is_one_to_train():
    assert untrained(nn.Linear(2, 2)) == "weight"
    assert untrained(nn.Linear(2, 2).requires_grad_(False)) is None
    assert untrained(nn.CrossEntropyLoss(weight=torch.ones(3))) is None
    assert untrained(own_loss) is None


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss, nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), F.huber_loss, F.poisson_nll_loss,
        nn.PoissonNLLLoss(), F.kl_div, nn.KLDivLoss(),
    ],
)  # fmt: skip
def test_elementwise_loss_of_unequal_shapes_is_said_to_repeat_values(loss):
    said = str(misfit(loss, torch.ones(2, 1), torch.ones(2)))
    assert "would broadcast them; give targets of the output's shape" in said
    assert misfit(loss, torch.ones(2, 1), torch.ones(2, 1)) is None
    assert misfit(own_loss, torch.ones(2, 1), torch.ones(2)) is None  # as the user wishes


@pytest.mark.parametrize(
    ("output", "targets", "said"),
    [
        (torch.ones(2, 3), torch.tensor([0, 2]), None),
        (torch.ones(2, 3), torch.tensor([0, 2], dtype=torch.uint8), None),
        (torch.ones(2, 3, 5), torch.zeros(2, 5, dtype=torch.int64), None),
        (torch.ones(2, 3), torch.ones(2, 3).softmax(1), None),  # probabilities
        (torch.ones(2, 3), torch.tensor([0, 2], dtype=torch.int32), "classes are int64, got int32"),
        (torch.ones(2, 3), torch.tensor([True, False]), "classes are int64, got bool"),
        (torch.ones(2, 3), torch.ones(2), "targets of float32 are not classes"),
        # What torch would take: probabilities of the only class, and one sample with a class for each of the batch.
        (torch.ones(2, 1), torch.ones(2, 1), "targets of float32 are not classes"),
        (torch.ones(2), torch.ones(2), "such as loss=nn.MSELoss()"),
    ],
)
def test_cross_entropy_takes_classes_and_probabilities_alone(output, targets, said):
    found = misfit(F.cross_entropy, output, targets)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": nn.MSELoss()}, r"output \[2, 3\] with targets \[2\]: it compares value by value"),
        ({"train_data": (blobs(40)[0], torch.randn(40, 1)), "model": lambda: nn.Linear(4, 1)}, "are not classes"),
        ({"loss": nn.MSELoss}, r"loss must be an object, got the class MSELoss; give loss=MSELoss\(\)"),
        ({"loss": nn.Linear(3, 3)}, "the loss holds a parameter, weight, which nothing would train"),
        (
            {
                "train_data": (blobs(40)[0], torch.randn(40, 1)),
                "test_data": (blobs(40)[0], torch.randn(40)),
                "model": lambda: nn.Linear(4, 1),
                "loss": nn.MSELoss(),
            },
            r"of the test data, the loss cannot take .* targets \[2\]",
        ),
    ],
)
def test_loss_that_would_train_on_nonsense_is_refused_before_training(options, said):
    with pytest.raises(UserError, match=said) as caught:
        make_trainer(**options)
    assert "\n" not in str(caught.value)


def test_cross_entropy_as_a_module_trains_like_the_default_and_is_checked_like_it():
    one = make_trainer(loss=nn.CrossEntropyLoss()).fit(max_rounds=3)
    other = make_trainer().fit(max_rounds=3)
    assert torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    with pytest.raises(UserError, match="the data has 5 classes"):
        make_trainer(train_data=(blobs(40)[0], torch.arange(40) % 5), loss=nn.CrossEntropyLoss())
    make_trainer(loss=nn.CrossEntropyLoss(), label_smoothing=0.1)


def test_weights_of_classes_are_taken_to_the_device_and_count():
    class Weighted(nn.CrossEntropyLoss):
        def to(self, *args, **kwargs):
            asked.append(args)
            return super().to(*args, **kwargs)

    asked: list[tuple[object, ...]] = []
    weighted = Weighted(weight=torch.tensor([0.01, 0.01, 1.0]))
    alike = torch.ones(40, 4), blobs(40)[1]  # nothing but the weights tells the classes apart
    trainer = make_trainer(loss=weighted, train_data=alike, optimizer=SGD(learning_rate=0.1))
    assert asked == [(torch.device("cpu"),)]
    assert trainer.fit(max_epochs=2).model(alike[0][:1]).argmax() == 2


def test_metric_that_cannot_be_measured_is_refused_before_training():
    with pytest.raises(
        UserError, match=r"metrics\['each'\] cannot take the model's output \[2, 3\] with targets \[2\]"
    ):
        make_trainer(test_data=blobs(8), metrics={"each": lambda outputs, targets: outputs})


def contrastive(outputs, targets):  # log B at first, which doubles from two samples to four
    own = F.normalize(outputs, dim=1)
    return F.cross_entropy(own @ own.t(), torch.arange(len(own)))


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (nn.MSELoss(reduction="sum"), True),
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (partial(F.huber_loss, reduction="sum"), True),
        (lambda outputs, targets: (outputs - targets).square().sum() / 32, True),  # the mean for one size of batches
        (own_loss, False),
        (contrastive, False),
        (lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum") * 0, False),
    ],
)
def test_a_loss_that_is_a_sum_is_told_by_its_values(loss, is_sum):
    found = misfit(loss, torch.ones(2, 3), torch.full((2, 3), 0.5))
    assert (found is not None and "is twice as large for a batch that is there twice" in found) == is_sum


def ignoring(outputs, targets):
    return F.cross_entropy(outputs[targets >= 0], targets[targets >= 0])


@pytest.mark.parametrize(
    ("loss", "accumulate", "ignored", "said"),
    [(ignoring, 2, -100, True), (ignoring, 1, -100, False), (ignoring, 2, 1, False), (contrastive, 2, 1, True),
     (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), 2, -100, False)],
)  # fmt: skip
def test_a_mean_of_micro_batches_that_is_another_is_said(loss, accumulate, ignored, said):
    targets = torch.tensor([0, ignored] * 8)
    trainer = Trainer(
        model=partial(nn.Linear, 4, 3), train_data=(torch.randn(16, 4), targets), loss=loss, batch_size=4,
        accumulate=accumulate, executor="serial", device="cpu",
    )  # fmt: skip
    assert any("is not the mean of those of its micro-batches" in note for note in trainer.run.warnings) == said


SCORES = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])


@pytest.mark.parametrize(
    ("loss", "output", "targets", "said"),
    [
        (F.cross_entropy, SCORES.softmax(1), torch.tensor([0, 1]), "leave the softmax out"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), SCORES.softmax(1), torch.tensor([0, 1]), "leave the softmax out"),
        (F.cross_entropy, SCORES, torch.tensor([0, 1]), None),
        (F.cross_entropy, SCORES.log_softmax(1), torch.tensor([0, 1]), None),  # its softmax is what it was of
        (nn.NLLLoss(), SCORES, torch.tensor([0, 1]), "end the model with log_softmax"),
        (nn.NLLLoss(), SCORES.softmax(1), torch.tensor([0, 1]), "end the model with log_softmax"),
        (F.nll_loss, SCORES.log_softmax(1), torch.tensor([0, 1]), None),
        (own_loss, torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 3.0]), "compares every sample with every other"),
        (own_loss, torch.tensor([1.0, 3.0]), torch.tensor([[1.0], [3.0]]), "compares every sample with every other"),
        (own_loss, torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [4.0]]), None),
        (lambda outputs, right: own_loss(outputs[:, 0], right), SCORES[:, :1], torch.tensor([0.0, 4.0]), None),
        (lambda outputs, right: (outputs - right).std(), SCORES, SCORES**2, None),  # of samples together
    ],
)
def test_remarks_tell_of_outputs_that_are_not_what_the_loss_takes(loss, output, targets, said):
    found = remarks(loss, output, targets)
    assert (said is None and found == []) or (len(found) == 1 and said in found[0])


@pytest.mark.parametrize(
    ("output", "targets", "found"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), "give targets.squeeze(1)"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.int64), "give targets.squeeze(1)"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64), None),
        (torch.zeros(()), torch.zeros(2, dtype=torch.int64), None),
    ],
    ids=["labels", "masks", "masks without channels", "a single number"],
)
def test_classes_with_a_dimension_of_channels_are_told_to_be_squeezed(output, targets, found):
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss(ignore_index=255)):
        said = misfit(loss, output, targets)
        assert said is None if found is None else found in said


@pytest.mark.parametrize(
    ("targets", "loss", "message"),
    [
        (torch.tensor([[1.0, 0, 1], [0, 0, 1]] * 8), None, "several labels a sample; give loss=nn.BCEWithLogitsLoss"),
        (torch.randn(16, 3), None, "got targets \\[16, 3\\] that do not; give a loss for numbers, such as loss=nn.MSE"),
        (torch.ones(16, 3, dtype=torch.int64), nn.BCEWithLogitsLoss(), "from 0 to 1, got int64; give targets.float"),
        (torch.ones(16, 3, dtype=torch.bool), nn.BCEWithLogitsLoss(), "from 0 to 1, got bool; give targets.float"),
    ],
)
def test_targets_and_losses_that_would_train_something_else_are_refused(
    targets: Tensor, loss: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(model=partial(nn.Linear, 4, 3), train_data=(torch.randn(16, 4), targets), loss=loss)


def test_tokens_that_are_their_own_targets_are_refused_and_shares_of_classes_train() -> None:
    ids = torch.randint(0, 9, (16, 5))

    class Shifting(nn.Sequential):
        def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:  # noqa: A002
            return cast("Tensor", super().forward(input))

    def tokens() -> nn.Module:
        return Shifting(nn.Embedding(9, 4), nn.Linear(4, 9))

    with pytest.raises(UserError, match=r"the targets are the inputs.*give inputs ids\[:, :-1\] and targets ids\[:, 1"):
        Trainer(model=tokens, train_data=(ids, ids))
    Trainer(model=tokens, train_data=(ids[:, :-1], ids[:, 1:]), executor="serial", device="cpu")
    shares = torch.rand(16, 3).softmax(1)
    Trainer(model=partial(nn.Linear, 4, 3), train_data=(torch.randn(16, 4), shares), executor="serial", device="cpu")


@pytest.mark.parametrize(("scale", "loss", "is_said"), [(1e5, nn.MSELoss(), True), (10.0, nn.MSELoss(), False)])
def test_targets_that_weights_take_long_to_reach_are_said(scale: float, loss: nn.Module, is_said: bool) -> None:
    data = torch.randn(8, 3), torch.arange(8.0)[:, None] * scale
    found = remarks_on_targets(data, loss)
    assert found == [] if not is_said else "a mean of 3.5e+05 and a standard deviation of 2.29e+05" in found[0]
