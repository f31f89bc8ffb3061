"""Samples drawn by weights: frequencies, and the same stream in every feed, whoever asks for it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.datasets import class_labels
from crossbow_py.data.randomness import uniform
from crossbow_py.data.sampler import SampleOrder, balanced_weights, weighted_order
from tests.unit.data.streams import closed

SEED, N = 3, 24
WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5] * 6)


def test_draw_is_the_first_sample_whose_share_of_the_weights_is_passed() -> None:
    expected = []
    for place in uniform(SEED, "weighted sample order", 5, N).tolist():
        passed = 0.0
        for sample, weight in enumerate(WEIGHTS.tolist()):
            passed += weight / 21.0
            if place < passed:
                expected.append(sample)
                break
    assert weighted_order(SEED, 5, WEIGHTS).tolist() == expected


def test_frequencies_are_in_proportion_to_the_weights() -> None:
    epochs = 2000
    drawn = np.concatenate([weighted_order(SEED, epoch, WEIGHTS) for epoch in range(epochs)])
    counts, expected = np.bincount(drawn, minlength=N), WEIGHTS / WEIGHTS.sum() * epochs * N
    assert not counts[WEIGHTS == 0].any()
    drawable = WEIGHTS > 0
    chi_square = ((counts - expected)[drawable] ** 2 / expected[drawable]).sum()
    assert chi_square < 40  # 17 degrees of freedom: exceeded by chance in one of 700 cases


def test_every_class_is_drawn_as_often_as_another_and_what_has_no_class_never() -> None:
    labels = np.array([0] * 30 + [1] * 5 + [2] * 1 + [-100] * 4)
    weights = balanced_weights(labels)
    assert [weights[labels == each].sum() for each in (0, 1, 2, -100)] == pytest.approx([1, 1, 1, 0])
    drawn = labels[np.concatenate([weighted_order(1, epoch, weights) for epoch in range(300)])]
    assert np.bincount(drawn) / len(drawn) == pytest.approx([1 / 3] * 3, abs=0.02)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    order = SampleOrder(SEED, N, WEIGHTS)
    assert order.ids(4).tolist() == SampleOrder(SEED, N, WEIGHTS).ids(4).tolist()
    assert order.ids(4).tolist() != order.ids(5).tolist()
    assert order.ids(4).tolist() != SampleOrder(SEED + 1, N, WEIGHTS).ids(4).tolist()
    assert sorted(SampleOrder(SEED, N).ids(4).tolist()) == list(range(N))


def test_largest_draw_that_rounding_may_give_is_a_sample_that_may_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossbow_py.data.sampler.uniform", lambda *_: np.full(3, 1 - 2.0**-53))
    for scale in (1.0, 3.0, 1e-3, 7e11):
        assert weighted_order(0, 0, scale * np.array([1.0, 1.0, 0.0])).tolist() == [1, 1, 1]


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (N, 3, 8, 8), generator=generator).to(torch.uint8), torch.arange(N)


class Items:
    """The pictures as a map-style data set."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return pictures()[0][index], index


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streamed_batches_are_those_of_tensors_with_the_same_flips(workers: int, num_ranks: int) -> None:
    options: dict[str, Any] = {"augmentation": Augmentation(flip=True), "sample_weights": WEIGHTS, "order_seed": 9}
    resident = make_feed(pictures(), 4, SEED, **options)
    streamed = make_feed(Items(), 4, SEED, num_workers=workers, num_ranks=num_ranks, **options)
    expected = [int(weighted_order(9, place // N, WEIGHTS)[place % N]) for place in range(4 * 13)]
    found: list[int] = []
    try:
        for start in range(0, 4 * 13, 4):
            ours, theirs = streamed.batch(start), resident.batch(start)
            assert torch.equal(ours.inputs, theirs.inputs) and torch.equal(ours.targets, theirs.targets)
            found += theirs.targets.tolist()
    finally:
        closed([streamed])
    assert found == expected


def test_sample_that_comes_twice_in_an_epoch_does_not_look_the_same_each_time() -> None:
    weights = np.zeros(N)
    weights[5] = 1.0
    feed = make_feed(pictures(), N, SEED, augmentation=Augmentation(crop_padding=2, flip=True), sample_weights=weights)
    batch = feed.batch(0)
    assert set(batch.targets.tolist()) == {5}
    different = sum(not torch.equal(one, other) for one, other in itertools.combinations(batch.inputs, 2))
    assert different > 0.9 * N * (N - 1) / 2  # two of 25 crops and 2 flips are equal in one of 50 cases


class Noise:
    """Items of which each is drawn anew."""

    targets = (0,) * (N - 1) + (1,)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


def test_own_augmentation_of_a_data_set_differs_each_time_and_repeats() -> None:
    weights = np.zeros(N)
    weights[5] = 1.0
    first, again = (make_feed(Noise(), 8, SEED, sample_weights=weights).batch(0).inputs for _ in range(2))
    assert torch.equal(first, again)
    assert len({tuple(row.tolist()) for row in first}) == 8


def test_classes_are_known_of_tensors_of_data_sets_with_targets_and_of_subsets_of_these() -> None:
    inputs, targets = pictures()
    for data in ((inputs, targets), TensorDataset(inputs, targets)):
        found = class_labels(data)
        assert found is not None and found.tolist() == list(range(N))
    part = class_labels(Subset(Subset(Noise(), [23, 1, 2]), [0, 2]))  # type: ignore[arg-type]
    assert part is not None and part.tolist() == [1, 0]
    assert class_labels((inputs, torch.rand(N))) is None
    assert class_labels(Items()) is None
