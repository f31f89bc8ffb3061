"""Targets and limits that would train on nonsense or fail midway are refused before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py import UserError
from crossbow_py.core.errors import BadDataError, BadSampleError
from tests.support import linear_model
from tests.trainers import Recorder, blobs, make_trainer

INPUTS, CLASSES = blobs(40)


def with_label(label):
    """Return the blobs with another label for sample 30."""
    targets = CLASSES.clone()
    targets[30] = label
    return INPUTS, targets


def as_items(pair):
    return list(zip(pair[0], pair[1].tolist(), strict=True))


class PerToken(nn.Module):
    """A model with scores [batch, tokens, classes]: classes are last."""

    def __init__(self, num_classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, num_classes)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("label", [-1, 3, 2**62])
@pytest.mark.parametrize("which", ["train", "test", "validation"])
def test_trainer_of_a_label_that_is_no_class_refuses_it_before_training(which, label):
    data = {"train_data": blobs(40), "num_classes": 3, f"{which}_data": with_label(label)}
    named = "training" if which == "train" else which
    with pytest.raises(UserError, match=rf"^sample 30 of the {named} data has the class {label}, and the model tells"):
        make_trainer(**data)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=torch.ones(3)), nn.NLLLoss(), nn.functional.nll_loss])
def test_trainer_with_another_loss_of_classes_refuses_labels_that_are_none(loss):
    with pytest.raises(UserError, match="sample 30 of the training data has the class 3"):
        make_trainer(train_data=with_label(3), loss=loss)


def test_trainer_of_labels_that_the_loss_leaves_out_takes_them():
    assert make_trainer(train_data=with_label(-100)).fit(max_epochs=1).status == "finished"
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3), ignore_index=7)
    assert make_trainer(train_data=with_label(7), loss=weighted).fit(max_epochs=1).status == "finished"
    with pytest.raises(UserError, match="has the class -100, .* 0 to 2 .7 is left out of the loss"):
        make_trainer(train_data=with_label(-100), loss=weighted)


def test_trainer_of_a_mask_with_a_label_that_is_no_class_names_its_sample():
    targets = torch.zeros(8, 6, dtype=torch.int64)
    targets[5, 2] = 9
    with pytest.raises(UserError, match="sample 5 of the training data has the class 9"):
        make_trainer(model=lambda: nn.Conv1d(4, 3, 1), train_data=(torch.ones(8, 4, 6), targets))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("which", ["train", "test"])
def test_fit_on_an_item_whose_label_is_no_class_names_the_item(which, num_workers):
    data = {"train_data": blobs(40), f"{which}_data": as_items(with_label(3))}
    trainer = make_trainer(**data, num_workers=num_workers)
    with pytest.raises(BadDataError, match="^item 30 of the data set has the class 3, and the model tells 3"):
        trainer.fit(max_epochs=1)


def test_trainer_of_classes_in_the_last_place_says_how_to_move_them():
    pixels = torch.randint(0, 5, (8, 6, 7))
    with pytest.raises(UserError, match=r"takes the scores of classes from dimension 1; return output.movedim"):
        make_trainer(model=lambda: PerToken(5), train_data=(pixels, pixels))


def test_trainer_that_cannot_tell_classes_from_places_says_where_it_looks():
    tokens = torch.randint(0, 5, (8, 5))
    recorder = Recorder()

    class OfFive(PerToken):  # or it would be asked for fewer
        def forward(self, tokens):
            return super().forward(tokens.view(-1, 5))

    make_trainer(model=lambda: OfFive(5), train_data=(tokens, tokens), callbacks=[recorder]).fit(max_rounds=1)
    assert any("is [batch, 5, 5]: classes are in dimension 1" in message for message in recorder.of("message"))


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_trainer_of_complex_targets_refuses_them(shape):
    with pytest.raises(UserError, match="it is cross-entropy, and targets of complex64 are not classes"):
        make_trainer(train_data=(INPUTS, torch.zeros(shape, dtype=torch.complex64)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("streamed", [False, True])
def test_trainer_of_images_without_width_refuses_them(dtype, streamed):
    images = torch.zeros(40, 3, 8, 0, dtype=dtype)
    data = as_items((images, CLASSES)) if streamed else (images, CLASSES)
    with pytest.raises(UserError, match=r"its inputs are of shape \[3, 8, 0\]"):
        make_trainer(train_data=data)


@pytest.mark.parametrize("streamed", [False, True])
def test_fit_with_no_time_for_a_round_is_refused_and_writes_no_model(tmp_path, streamed):
    data = as_items(blobs(40)) if streamed else blobs(40)
    trainer = make_trainer(train_data=data, num_workers=0, output_dir=tmp_path)
    with pytest.raises(UserError, match="^max_time_s=1e-12 was reached before the first round, so nothing was trained"):
        trainer.fit(max_time_s=1e-12)
    assert not (tmp_path / "model.safetensors").exists()


class Broken:
    """A data set that fails at item 24, two calls deep."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return INPUTS[index], self.label(index)

    def label(self, index):
        return int(CLASSES[index]) if index != 24 else {}["no such label"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_fit_on_an_item_that_raises_says_which_and_where(num_workers):
    trainer = make_trainer(train_data=Broken(), num_workers=num_workers)
    line = Broken.label.__code__.co_firstlineno + 1
    expected = rf"^item 24 of the data set cannot be read \(KeyError: 'no such label' at {__file__}:{line}\)"
    with pytest.raises(BadSampleError, match=expected) as raised:
        trainer.fit(max_epochs=1)
    assert "in __getitem__" in str(raised.value.__cause__)
    assert "in label" in str(raised.value.__cause__)


def test_trainer_of_a_first_item_that_raises_in_a_library_says_the_line_of_the_users_code():
    class First(Broken):
        def __getitem__(self, index):
            return torch.utils.data.default_collate([None]), 0

    line = First.__getitem__.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=rf"item 0 of the .* raised TypeError: .* at {__file__}:{line};"):
        make_trainer(train_data=First())


def test_fit_on_items_of_different_shapes_names_one():
    items = as_items(blobs(40))
    items[30] = (torch.zeros(5), 0)
    with pytest.raises(BadDataError, match=r"got \[4\] at .* and \[5\] at .*, which are items \d+ and 30\)"):
        make_trainer(train_data=items, num_workers=0, model=linear_model).fit(max_epochs=1)


def test_trainer_with_a_metric_that_would_repeat_values_refuses_it():
    data = torch.randn(8, 4), torch.randn(8)
    with pytest.raises(UserError, match=r"^metrics\['error'\]: .* would broadcast them; give targets of the output's"):
        make_trainer(
            model=lambda: nn.Linear(4, 1), train_data=data, test_data=data,
            loss=lambda outputs, right: (outputs[:, 0] - right).square().mean(), metrics={"error": nn.L1Loss()},
        )  # fmt: skip


def test_fit_with_a_softmax_before_cross_entropy_says_so():
    recorder = Recorder()
    model = lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))  # noqa: E731
    make_trainer(model=model, callbacks=[recorder]).fit(max_rounds=1)
    assert any("leave the softmax out of the model" in message for message in recorder.of("message"))
