"""Batches of crops: the same whatever else is in the batch, and what happens to images that cannot be read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import split_validation, take
from crossbow_py.data.images.crops import random_resized_box
from crossbow_py.data.images.decoding import centre_cropped, crop_resized, decode, shrunk
from crossbow_py.data.images.folder import ImageFiles
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded
from tests.unit.data.images.pictures import truncate, write_part


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    """Nine images of three classes, 40 pixels wide and 32, 40 or 48 high."""
    return write_part(tmp_path / "train")


def data_of(files: ImageFiles, **settings: Any) -> ImageFolderData:
    return ImageFolderData(files, **{"size": 16, "resize": 20, "min_area": 0.08, **settings})


def fetch(data: ImageFolderData, keys: list[Key], training: bool = True, seed: int = 3) -> Loaded:
    return data.fetch(keys, seed=seed, training=training, on_sample=lambda sample: None)


def keys_of(*samples: int, epoch: int = 0) -> list[Key]:
    return [Key(epoch, sample) for sample in samples]


def expected_crop(files: ImageFiles, file: int, key: Key, short_side: int | None = None) -> torch.Tensor:
    pixels = decode(files.path(file))
    pixels = pixels if short_side is None else shrunk(pixels, short_side)
    out = torch.empty((1, 3, 16, 16), dtype=torch.uint8, memory_format=torch.channels_last)
    crop_resized(pixels, random_resized_box(3, key.epoch, key.sample, pixels.shape[1], pixels.shape[0], 0.08), out)
    return out[0]


def test_fetch_for_training_gives_crops_and_classes_in_order(files: ImageFiles) -> None:
    keys = [Key(2, 4), Key(2, 0), Key(3, 8)]
    inputs, targets, bad, *_ = fetch(data_of(files), keys)
    assert (inputs.shape, inputs.dtype) == ((3, 3, 16, 16), torch.uint8)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert (targets.tolist(), targets.dtype, bad) == ([1, 0, 2], torch.int64, ())
    for image, key in zip(inputs, keys, strict=True):
        assert torch.equal(image, expected_crop(files, key.sample, key))


def test_fetch_of_a_key_is_the_same_in_any_batch(files: ImageFiles) -> None:
    data = data_of(files)
    whole = fetch(data, keys_of(*range(9), epoch=1)).inputs
    for sample in range(9):
        assert torch.equal(fetch(data, keys_of(sample, epoch=1)).inputs[0], whole[sample])
    assert torch.equal(fetch(data, keys_of(*reversed(range(9)), epoch=1)).inputs, whole.flip(0))


def test_fetch_for_evaluation_gives_centres_whatever_the_seed(files: ImageFiles) -> None:
    data = data_of(files)
    inputs, targets, *_ = fetch(data, keys_of(*range(9)), training=False)
    assert torch.equal(inputs, fetch(data, keys_of(*range(9)), training=False, seed=4).inputs)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    out = torch.empty((1, 3, 16, 16), dtype=torch.uint8, memory_format=torch.channels_last)
    centre_cropped(decode(files.path(5)), 20, out)
    assert torch.equal(inputs[5], out[0])
    assert torch.equal(data[5][0], out[0])
    assert data[5][1] == 1


def test_fetch_tells_every_sample_before_it_is_worked_on(files: ImageFiles) -> None:
    truncate(Path(files.path(3)))
    told: list[int] = []
    data_of(files, max_bad=1).fetch(keys_of(7, 3), seed=0, training=True, on_sample=told.append)
    assert told == [7, 3, 4]


def test_bad_image_while_training_is_replaced_by_the_next_that_can_be_read(files: ImageFiles) -> None:
    for file in (7, 8):
        truncate(Path(files.path(file)))
    inputs, targets, bad, *_ = fetch(data_of(files, max_bad=2), keys_of(7, 2))
    assert torch.equal(inputs[0], expected_crop(files, 0, Key(0, 7)))  # after the last comes the first
    assert targets.tolist() == [0, 0]
    assert [(one.sample, one.name) for one in bad] == [(7, files.path(7)), (8, files.path(8))]
    assert all("truncated" in one.reason for one in bad)


def test_bad_images_beyond_what_is_allowed_leave_a_black_place(files: ImageFiles) -> None:
    for file in (2, 3):
        truncate(Path(files.path(file)))
    inputs, targets, bad, *_ = fetch(data_of(files, max_bad=1), keys_of(2, 5))
    assert (len(inputs), targets.tolist(), [one.sample for one in bad]) == (2, [0, 1], [2, 3])
    assert not inputs[0].any()
    assert torch.equal(inputs[1], expected_crop(files, 5, Key(0, 5)))


def test_bad_image_in_evaluation_is_left_out(files: ImageFiles) -> None:
    truncate(Path(files.path(4)))
    data = data_of(files, max_bad=1)
    inputs, targets, bad, *_ = fetch(data, keys_of(3, 4, 6), training=False)
    assert (targets.tolist(), [one.sample for one in bad]) == ([1, 2], [4])
    assert torch.equal(inputs, fetch(data, keys_of(3, 6), training=False).inputs)
    assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_image_that_is_gone_is_a_bad_one_and_listed_once(files: ImageFiles) -> None:
    Path(files.path(4)).unlink()
    bad = (BadSample(4, files.path(4), "No such file or directory"),)
    assert fetch(data_of(files, max_bad=1), keys_of(4, 4, 4)).bad == bad


def test_max_bad_is_less_than_all(files: ImageFiles) -> None:
    assert data_of(files, max_bad=100).max_bad == 8
    assert data_of(files, max_bad=3).max_bad == 3


def test_item_that_cannot_be_read_is_the_next_or_a_user_error(files: ImageFiles) -> None:
    truncate(Path(files.path(2)))
    assert torch.equal(data_of(files, max_bad=1)[2][0], data_of(files)[3][0])
    assert data_of(files, max_bad=1)[2][1] == 1
    with pytest.raises(UserError, match=rf"image {files.path(2)} cannot be read \(.*truncated.*max_bad_images=0"):
        data_of(files)[2]


def test_subset_has_samples_classes_and_names_of_its_own(files: ImageFiles) -> None:
    data = data_of(files)
    part = data.subset(np.array([8, 1, 5]))
    assert (len(part), len(data), part.classes) == (3, 9, data.classes)
    assert [part.name_of(sample) for sample in range(3)] == [files.path(file) for file in (8, 1, 5)]
    inputs, targets, *_ = fetch(part, keys_of(2, 0), training=False)
    assert targets.tolist() == [1, 2]
    assert torch.equal(inputs, fetch(data, keys_of(5, 8), training=False).inputs)
    again = part.subset(np.array([2]))
    assert (len(again), again.name_of(0)) == (1, files.path(5))


def test_subset_replaces_bad_images_by_its_own(files: ImageFiles) -> None:
    truncate(Path(files.path(5)))
    part = data_of(files, max_bad=1).subset(np.array([0, 5, 7]))
    _, targets, bad, *_ = fetch(part, keys_of(1))
    assert (targets.tolist(), bad[0].sample, bad[0].name) == ([2], 1, files.path(5))


def test_validation_split_of_images_is_two_subsets(files: ImageFiles) -> None:
    train, held = split_validation(data_of(files), 0.34)
    assert isinstance(train, ImageFolderData)
    assert isinstance(held, ImageFolderData)
    names = [part.name_of(sample) for part in (train, held) for sample in range(len(part))]
    assert (len(held), sorted(names)) == (3, sorted(files.path(file) for file in range(9)))
    assert isinstance(take(held, np.array([0])), ImageFolderData)


def test_data_after_pickling_gives_the_same(files: ImageFiles) -> None:
    data = data_of(files).subset(np.array([3, 4]))
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(fetch(again, keys_of(0, 1)).inputs, fetch(data, keys_of(0, 1)).inputs)


def test_data_that_shrinks_crops_from_the_smaller_image(files: ImageFiles) -> None:
    data = data_of(files, shrinks=True)
    assert torch.equal(fetch(data, keys_of(6)).inputs[0], expected_crop(files, 6, Key(0, 6), short_side=20))
    # The centre comes from the same pixels: the smaller image has the short side that evaluation resizes to.
    centres = [fetch(each, keys_of(6), training=False).inputs for each in (data, data_of(files))]
    assert torch.equal(*centres)


def test_batch_is_written_where_it_is_asked_for(files: ImageFiles) -> None:
    data = data_of(files)
    for training in (True, False):
        expected = fetch(data, keys_of(3, 0, 8), training)
        out = torch.full((5, *data.image_shape), 7, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
        made = data.fetch(keys_of(3, 0, 8), seed=3, training=training, on_sample=lambda _: None, out=out)
        assert torch.equal(made.inputs, expected.inputs) and made.inputs.data_ptr() == out.data_ptr()
        assert (out[3:] == 7).all()
