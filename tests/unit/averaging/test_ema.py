"""When the EMA of z moves and how far, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from crossbow_py.averaging import RULES, Independent
from crossbow_py.averaging.ema import decay, is_due
from crossbow_py.core.errors import UserError


def followed(values: list[float], apart: int, horizon: float) -> float:
    """The EMA of a z that has these values, so many samples apart."""
    found = 1e9  # what it starts from counts for nothing
    for n, value in enumerate(values, start=1):
        d = decay(apart, n * apart, horizon)
        found = d * found + (1 - d) * value
    return found


def test_young_ema_weighs_what_it_saw_by_the_ninth_power() -> None:
    assert [decay(10, t, 1000.0) for t in (10, 20, 40)] == [0.0, 0.5**10, 0.75**10]
    # The integrals of 10·s⁹ over thirds.
    thirds = (1 / 3) ** 10, (2 / 3) ** 10 - (1 / 3) ** 10, 1 - (2 / 3) ** 10
    expected = sum(weight * value for weight, value in zip(thirds, (3.0, 5.0, 10.0), strict=True))
    assert followed([3.0, 5.0, 10.0], 10, horizon=1000.0) == pytest.approx(expected)
    # Of what rises evenly it is 10/11: a tenth behind.
    assert followed([float(n) for n in range(1, 1001)], 1, horizon=1e6) == pytest.approx(1000 * 10 / 11, rel=1e-3)


def test_weights_count_samples_where_moves_are_not_evenly_apart() -> None:
    # 10 samples at 3, then 30 at 5
    d = decay(30, 40, 1000.0)
    assert d * 3.0 + (1 - d) * 5.0 == pytest.approx(3 * 0.25**10 + 5 * (1 - 0.25**10))


def test_ema_does_not_move_where_nothing_was_seen_since_and_is_z_where_nothing_was_seen_at_all() -> None:
    assert decay(0, 400, 1000.0) == 1.0
    assert decay(0, 0, 1000.0) == 0.0
    assert decay(8, 400, 1e-300) == 0.0


def test_ema_moves_where_a_twentieth_of_the_horizon_is_passed() -> None:
    # Multiples of 20 in rounds of 8 samples.
    moves = [end for end in range(8, 88, 8) if is_due(end - 8, end, 400.0, 10**6)]
    assert moves == [24, 40, 64, 80]


def test_ema_moves_where_a_multiple_that_is_no_float_is_reached() -> None:
    moves = [end for end in range(64, 1089, 64) if is_due(end - 64, end, 4096.0, 10**6)]  # multiples of 204.8
    assert moves == [256, 448, 640, 832, 1024]


@pytest.mark.parametrize("size", [1, 7, 32, 50])
def test_ema_moves_twenty_times_a_horizon_whatever_the_size_of_a_round(size: int) -> None:
    ends = range(size, 10_000, size)
    assert sum(is_due(end - size, end, 1000.0, 10**6) for end in ends) == 10_000 // 50 - 1


def test_ema_moves_four_times_an_epoch_however_long_the_horizon() -> None:
    for horizon in (5000.0, 1e9):  # else a run of a hundredth of its horizon would have none
        assert sum(is_due(end - 10, end, horizon, 1000) for end in range(10, 3000, 10)) == 11


@pytest.mark.parametrize("horizon", [100.0, 1e-300])
def test_ema_moves_after_every_round_that_is_longer_than_that(horizon: float) -> None:
    assert all(is_due(end - 16, end, horizon, 10**6) for end in range(16, 400, 16))


@pytest.mark.parametrize("name", sorted(RULES.keys() - {Independent.NAME}))
def test_every_rule_with_an_average_model_has_an_ema_with_a_horizon_above_zero(name: str) -> None:
    assert RULES[name]().average_ema is None
    assert RULES[name](average_ema=2.5).average_ema == 2.5  # type: ignore[call-arg]
    for horizon in (0.0, -1.0):
        with pytest.raises(UserError, match=r"averaging\.average_ema must be greater than 0"):
            RULES[name](average_ema=horizon)  # type: ignore[call-arg]
