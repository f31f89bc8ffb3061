"""Searches over made-up devices: what is returned was run, and is near the largest that could have been."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from crossbow_py.estimate.batch_search import largest_measured

LIMIT = 10_000


class Device:
    """Runs rounds of any size; out of memory beyond `truth`, by chance too where `fails` says so."""

    def __init__(self, needs: Callable[[int], int], fails: Callable[[int], bool] = lambda _: False) -> None:
        self.needs, self.fails, self.tried = needs, fails, list[int]()

    def __call__(self, batch_size: int) -> int | None:
        assert batch_size >= 1
        self.tried.append(batch_size)
        needed = self.needs(batch_size)
        return None if needed > LIMIT or self.fails(batch_size) else needed

    @property
    def truth(self) -> int:
        return max((b for b in range(1, 5000) if self.needs(b) <= LIMIT), default=0)


def linear(b: int) -> int:
    return 500 + 13 * b


def kinked(b: int) -> int:
    return max(500 + 5 * b, 20 * b - 2000)


def stepped(b: int) -> int:
    """As an allocator that takes segments."""
    return -(-linear(b) // 700) * 700


@pytest.mark.parametrize("first", [8, 200, 3000])
@pytest.mark.parametrize("needs", [linear, kinked, stepped])
def test_search_ends_near_the_largest_that_fits(needs: Callable[[int], int], first: int) -> None:
    device = Device(needs)
    found = largest_measured(device, LIMIT, first=first, most=5000)
    assert 0.95 * device.truth <= found.batch_size <= device.truth
    assert found.bytes == needs(found.batch_size)
    assert len(device.tried) <= 12


@pytest.mark.parametrize("seed", range(50))
def test_search_where_memory_runs_out_by_chance_returns_only_what_was_run(seed: int) -> None:
    chance = random.Random(seed)
    device = Device(linear, lambda _: chance.random() < 0.4)
    found = largest_measured(device, LIMIT, first=8, most=5000)
    ran = {batch_size for batch_size, taken in found.points if taken is not None}
    assert found.batch_size in ran or (found.batch_size == 0 and not ran)
    assert [batch_size for batch_size, _ in found.points] == device.tried
    assert len(device.tried) == len(set(device.tried)) <= 12


def test_search_where_rounds_take_more_than_the_limit_without_failing_stays_below_it() -> None:
    found = largest_measured(linear, LIMIT, first=8, most=5000)
    assert found.batch_size == 730
    assert any(taken is not None and taken > LIMIT for _, taken in found.points)


def test_search_where_nothing_fits_is_zero() -> None:
    found = largest_measured(Device(lambda b: LIMIT + b), LIMIT, first=8, most=5000)
    assert found.batch_size == 0
    assert [b for b, _ in found.points] == [8, 4, 2, 1]
    assert found.bytes is None
