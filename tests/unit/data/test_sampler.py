"""The sample stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.data.sampler import epoch_order, segments


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 4, [(0, 0, 4)]),
        (6, 4, [(0, 6, 10)]),
        (8, 4, [(0, 8, 10), (1, 0, 2)]),
        (10, 3, [(1, 0, 3)]),
        (25, 25, [(2, 5, 10), (3, 0, 10), (4, 0, 10)]),
        (7, 0, []),
    ],
)
def test_segments_of_ten_samples_cross_epochs_where_they_end(
    start: int, count: int, expected: list[tuple[int, int, int]]
) -> None:
    assert segments(start, count, 10) == expected


def test_segments_over_an_epochs_end_join_its_tail_and_the_next_head() -> None:
    orders = {0: [2, 0, 1], 1: [1, 2, 0]}
    runs = segments(2, 3, 3)
    assert [sample for epoch, first, last in runs for sample in orders[epoch][first:last]] == [1, 1, 2]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40))
def test_segments_of_any_batch_size_visit_every_sample_once_an_epoch(n: int, batch: int, seed: int) -> None:
    batches = [
        np.concatenate([epoch_order(seed, epoch, n)[first:last] for epoch, first, last in segments(start, batch, n)])
        for start in range(0, 3 * n, batch)
    ]
    assert all(len(ids) == batch for ids in batches)
    ids = np.concatenate(batches)
    for epoch in range(3):
        assert sorted(ids[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_epoch_order_of_another_epoch_or_seed_is_another() -> None:
    orders = [epoch_order(seed, epoch, 50).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] and orders[0] != orders[2]
    assert epoch_order(0, 0, 50).tolist() == orders[0]
