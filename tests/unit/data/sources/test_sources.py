"""Digits, synthetic and custom data, the validation split, and the configuration files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import split_validation
from crossbow_py.data.sources.digits import Digits
from crossbow_py.data.sources.synthetic import Synthetic


def test_digits_hold_the_published_samples_in_a_fixed_stratified_split() -> None:
    source = Digits().load(progress=False)
    (images, labels), (test_images, test_labels) = source.train, source.test
    assert (images.shape, test_images.shape) == ((1501, 1, 8, 8), (296, 1, 8, 8))
    # Per-class counts of the repository's test file, from its documentation.
    published = torch.tensor([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert torch.equal(labels.bincount() + test_labels.bincount(), published)
    assert torch.equal(test_labels.bincount(), published // 6)
    # The first line of optdigits.tes, a zero, and the first test sample: the sixth zero of the file.
    assert images[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert labels[:10].tolist() == list(range(10))
    assert (int(images.max()), source.num_classes, source.input_shape) == (16, 10, (1, 8, 8))


def test_digits_normalise_to_mean_zero_and_unit_deviation() -> None:
    source = Digits().load(progress=False)
    values = (source.train[0] / 255 - source.mean[0]) / source.std[0]
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01


def test_synthetic_of_a_shape_is_learnable_and_normalised() -> None:
    source = Synthetic(shape=(2, 4, 5), num_classes=7, num_train=700, num_test=70).load(progress=False)
    (images, labels), (test_images, test_labels) = source.train, source.test
    assert (images.shape, images.dtype, test_images.shape) == ((700, 2, 4, 5), torch.uint8, (70, 2, 4, 5))
    assert (source.num_classes, source.input_shape, len(source.mean)) == (7, (2, 4, 5), 2)
    assert labels.bincount().tolist() == [100] * 7
    means = torch.stack([images[labels == label].float().mean(0).flatten() for label in range(7)])
    guesses = torch.cdist(test_images.float().flatten(1), means).argmin(1)
    assert (guesses == test_labels).float().mean() > 0.95
    values = (images / 255 - source.mean[0]) / source.std[0]
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1


def test_synthetic_of_equal_seeds_is_equal_and_of_others_differs() -> None:
    first, again, other = (Synthetic(num_train=4, num_test=2, seed=seed).load(False).train[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_synthetic_of_two_axes_is_a_user_error() -> None:
    with pytest.raises(
        UserError, match=r"data\.shape must be \[channels, height, width\] or, for clips, .* got \[8, 8\]"
    ):
        Synthetic(shape=(8, 8))


def test_synthetic_of_four_sizes_are_clips_normalised_by_channel() -> None:
    source = Synthetic(shape=(2, 3, 4, 5), num_classes=2, num_train=200, num_test=6).load(progress=False)
    clips, labels = source.train
    assert (clips.shape, clips.dtype, labels[:4].tolist()) == ((200, 2, 3, 4, 5), torch.uint8, [0, 1, 0, 1])
    assert (source.input_shape, len(source.mean), len(source.std)) == ((2, 3, 4, 5), 2, 2)
    assert (clips[::2].float().mean(0) - clips[1::2].float().mean(0)).abs().mean() > 20


@pytest.mark.parametrize("wrap", [lambda pair: pair, lambda pair: TensorDataset(*pair)])
def test_validation_split_of_a_pair_is_disjoint_complete_and_always_the_same(wrap: Any) -> None:
    data = wrap((torch.arange(50).view(50, 1), torch.arange(50)))
    (train, targets), (held_inputs, held) = split_validation(data, 0.1)
    assert (len(train), len(held)) == (45, 5)
    assert sorted([*targets.tolist(), *held.tolist()]) == list(range(50))
    assert torch.equal(held_inputs[:, 0], held)
    assert torch.equal(split_validation(data, 0.1)[1][1], held)
    assert held.tolist() == sorted(held.tolist())


def test_validation_split_of_a_map_style_data_set_is_disjoint() -> None:
    train, held = split_validation([(index, index) for index in range(20)], 0.25)
    assert isinstance(train, Subset)
    ids = [[int(part[place][0]) for place in range(len(part))] for part in (train, held)]
    assert (len(ids[0]), len(ids[1])) == (15, 5)
    assert sorted(ids[0] + ids[1]) == list(range(20))


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_validation_split_leaving_a_part_empty_is_a_user_error(fraction: float) -> None:
    with pytest.raises(UserError, match=rf"data\.validation_fraction={fraction} of 20 .* leaves a part empty"):
        split_validation((torch.zeros(20, 1), torch.zeros(20)), fraction)


def test_validation_fraction_of_a_source_comes_out_of_its_training_data() -> None:
    source = Digits(validation_fraction=0.1).load(progress=False)
    assert (len(source.train[1]), len(source.validation[1]), len(source.test[1])) == (1351, 150, 296)
    assert source.num_classes == 10
