"""The sample stream."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.data.sampler import RankPositions, epoch_order, joins, segments
from tests.unit.data.streams import counted_out

B = 4
# Two ranks of two learners, rank 0: 0 4 16 20 32 36 48 52 ...
PATH = RankPositions((0, 4), B, 2)


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


@pytest.mark.parametrize("num_own", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_positions_from_any_round_on_are_the_ranks_own(num_ranks: int, num_own: int) -> None:
    for rank in range(num_ranks):
        rounds = counted_out(rank, num_ranks, num_own, B, cursor=7, rounds=6)
        for done in range(3):
            positions = RankPositions(tuple(rounds[done]), B, num_ranks)
            expected = list(itertools.chain.from_iterable(rounds[done:]))
            assert [positions[index] for index in range(len(expected))] == expected


def test_positions_after_starts_that_do_not_adjoin_go_on_behind_the_last() -> None:
    positions = RankPositions((3, 40, 93), B, 1)
    assert [positions[index] for index in range(6)] == [3, 40, 93, 97, 101, 105]


def test_path_that_comes_there_too_late_does_not_join() -> None:
    other = RankPositions((32, 36), B, 2)
    assert joins(PATH, 2, other, 0, soon=2) and not joins(PATH, 1, other, 0, soon=2)


def test_paths_that_join_are_those_that_agree_for_long() -> None:
    shapes = [(first, num_own) for first in range(4) for num_own in range(1, 5)]
    agreeing = 0
    for (begin, before), (second, now) in itertools.product(shapes, repeat=2):
        path = RankPositions(tuple(B * (begin + j) for j in range(before)), B, 3)
        other = RankPositions(tuple(B * (second + j) for j in range(now)), B, 3)
        far = [path[number] for number in range(200)]
        wanted = [other[number] for number in range(100)]
        agree = any(far[first : first + 100] == wanted for first in range(now + 1))
        agreeing += agree
        assert joins(path, 0, other, 0, soon=now) is agree, (begin, before, second, now)
    assert agreeing == len(shapes) + 1  # each joins itself, and one learner's from 0 on comes to 3
