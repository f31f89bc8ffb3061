"""`trainer.predict(data)` and `trainer.evaluate(data)`: new data go through the model as evaluation has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from crossbow_py import SGD, Independent, Trainer, UserError
from tests.thinned import thinned
from tests.trainers import blobs, image_trainer, images, make_trainer

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


class Items:
    """A map-style data set of a list."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.fixture(scope="module")
def trained():
    trainer = image_trainer(mean=MEAN, std=STD)
    trainer.fit(max_epochs=1)
    return trainer


def normalised(pixels):
    """What the model gets, by hand."""
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize(
    "form",
    thinned(
        [
            lambda x, y: x,
            lambda x, y: x.numpy(),
            lambda x, y: (x, y),
            lambda x, y: {"input": x},
            lambda x, y: TensorDataset(x),
            lambda x, y: Items(list(x)),
            lambda x, y: Items([each.numpy() for each in x]),
            lambda x, y: Items(list(zip(x, y, strict=True))),
        ],
        quick=[1, 3, 7],
        slow=[4, 6],
    ),
    ids=["tensor", "array", "pair", "dict", "tensor data set", "items", "array items", "labelled items"],
)
def test_predict_has_the_numbers_of_a_plain_loop_of_the_model_in_every_form_of_data(trained, form):
    pixels, targets = images(300)  # more than an evaluation's batch
    outputs, classes = trained.predict(form(pixels, targets))
    with torch.no_grad():
        expected = torch.cat([trained.model(normalised(part)) for part in pixels.split(7)])
    assert torch.allclose(outputs, expected, atol=1e-5) and outputs.dtype == torch.float32
    assert torch.equal(classes, outputs.argmax(1)) and outputs.std() > 0.01


def test_evaluate_of_new_data_is_a_plain_mean_and_leaves_the_test_data_to_evaluate_without_any(trained):
    pixels, targets = images(45)
    pixels = 255 - pixels
    with torch.no_grad():
        outputs = trained.model(normalised(pixels))
    for data in ((pixels, targets), (pixels.numpy(), targets.numpy()), Items(list(zip(pixels, targets, strict=True)))):
        found = trained.evaluate(data)
        assert found.loss == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-5)
        assert found.accuracy == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert trained.evaluate() == trained.evaluate(images(20))


def test_new_data_of_independent_learners_are_evaluated_on_all_and_predicted_by_the_first():
    trainer = make_trainer(averaging=Independent(), optimizer=SGD(learning_rate=(0.01, 0.1)))
    result = trainer.fit(max_epochs=1)
    x, y = blobs(12)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y).item() for model in result.models]
    assert losses[0] != pytest.approx(losses[1])
    assert trainer.evaluate((x, y)).loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert torch.allclose(trainer.predict(x).outputs, result.models[0](x), atol=1e-6)


def test_predicted_classes_are_of_the_last_dimension_for_tokens_and_none_for_numbers():
    ids = torch.arange(12).view(3, 4) % 5
    tokens = make_trainer(model=lambda: nn.Embedding(5, 5), train_data=(ids, ids), batch_size=2)
    outputs, classes = tokens.predict(ids[:2])
    assert outputs.shape == (2, 4, 5) and torch.equal(classes, outputs.argmax(-1))
    x = blobs(40)[0]
    numbers = make_trainer(model=lambda: nn.Linear(4, 3), train_data=(x, x[:, :3]), loss=nn.MSELoss())
    outputs, classes = numbers.predict(x)
    assert classes is None and torch.allclose(outputs, numbers.model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3, 8, 8, dtype=torch.uint8), r"samples of shape \[8, 8\].*trained on \[3, 8, 8\].*x\[None\]"),
        (torch.zeros(4), r"predict\(\) needs samples \[N, \.\.\.\], got shape \[4\]"),
        (torch.zeros(0, 3, 8, 8), "at least one, got 0 and 0"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "one value a channel, got 3 for 1 channels"),
        ({"pixels": images(2)[0]}, r"forward takes \(input\), and a sample of the new data has pixels"),
        (None, "the new data must be tensors"),
    ],
    ids=["one image", "one vector", "empty", "channels", "name", "none"],
)
def test_predict_refuses_what_the_model_was_not_made_for_in_one_line(trained, data, message):
    with pytest.raises(UserError, match=message) as raised:
        trained.predict(data)
    assert "\n" not in str(raised.value)


def test_evaluate_refuses_new_data_without_targets_and_with_classes_that_the_model_lacks(trained):
    pixels, targets = images(6)
    with pytest.raises(UserError, match="new data must be"):
        trained.evaluate(pixels)
    with pytest.raises(UserError, match="of the new data has the class 3"):
        trained.evaluate((pixels, targets + 1))


def test_predict_is_refused_within_a_round():
    trainer: Trainer = make_trainer()
    with pytest.raises(UserError, match="cannot be read while a round is in flight"):
        trainer.fit(max_epochs=1, after_round=lambda _: print(trainer.predict(blobs(3)[0])))
