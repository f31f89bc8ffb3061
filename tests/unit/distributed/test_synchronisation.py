"""What follows from ranks' reports, and when they synchronise: numbers worked by hand."""

from __future__ import annotations

import pytest

from crossbow_py.distributed.synchronisation import (
    Agreed,
    Report,
    SynchronisationSchedule,
    agree,
    differing_ranks,
    rounds_to_next,
    signal_number,
)


def test_report_survives_the_way_to_numbers_and_back():
    report = Report(1.5, signal=2, fails=1, out_of_memory=0, num_non_finite=3, checkpoint=2, on_trial=1, num_compared=4)
    assert report.to_values() == [1.5, 2.0, 1.0, 0.0, 3.0, 2.0, 1.0, 0.0, 0.0, 4.0]
    assert Report.from_values(report.to_values()) == report


def test_agree_takes_the_slowest_clock_and_what_came_up_on_any_rank():
    agreed = agree(
        [
            Report(2.0, checkpoint=2),
            Report(3.5, num_non_finite=1, out_of_memory=1),
            Report(3.0, signal=1, fails=1, num_non_finite=2, checkpoint=1),
        ]
    )
    assert agreed == Agreed(3.5, "terminated", fails=True, out_of_memory=True, num_non_finite=3, checkpoints=(2, 0, 1))


@pytest.mark.parametrize(
    ("statuses", "gravest"),
    [
        ([None, None], None),
        (["terminated", None], "terminated"),
        ([None, "interrupted"], "interrupted"),
        (["interrupted", "terminated"], "interrupted"),
    ],
)
def test_agree_takes_the_gravest_signal_whoever_got_it(statuses, gravest):
    assert agree([Report(0.0, signal=signal_number(status)) for status in statuses]).signal == gravest


@pytest.mark.parametrize(
    ("round_s", "period", "every_round", "rounds"),
    [
        (0.001, 1, False, 50),  # 0.05 s are 50 rounds
        (0.007, 1, False, 7),  # 7.14
        (0.05, 1, False, 1),
        (2.0, 1, False, 1),
        (0.002, 4, False, 24),  # 6.25 periods
        (0.001, 3, False, 51),  # 16.7 periods
        (2.0, 7, False, 7),
        (0.0, 1, False, 1),  # no time measured yet
        (0.0, 5, False, 5),
        (0.001, 4, True, 1),
    ],
)
def test_rounds_to_next_is_about_a_twentieth_of_a_second_in_whole_periods(round_s, period, every_round, rounds):
    assert rounds_to_next(round_s, period, every_round) == rounds


@pytest.mark.parametrize(
    ("found", "odd"),
    [
        ([(0, 5)], []),
        ([(0, 5), (0, 5)], []),
        ([(0, 5), (0, 6)], [1]),  # a tie: the first counts
        ([(0, 6), (0, 5), (0, 5)], [0]),
        ([(0, 5), (0, 6), (0, 5), (0, 7)], [1, 3]),
        ([(0, 5), (0, 6), (0, 7)], [1, 2]),
        ([(0, 5), (0, 5), (1, 6), (1, 6)], []),  # nodes have one each
        ([(0, 5), (1, 6), (0, 5), (1, 7)], [3]),
        ([(1, 6), (0, 5), (1, 7), (1, 7), (0, 4)], [4, 0]),
    ],
)
def test_differing_names_ranks_that_are_not_as_most_of_their_group(found, odd):
    assert differing_ranks(found) == odd


def rounds_synchronised(periods, period=1, first=10):
    """Rounds before which ranks synchronise, when so many seconds go by in between."""
    schedule, index, found = SynchronisationSchedule(first), first, []
    for seconds in [0.0, *periods]:
        while not schedule.is_due(index):
            index += 1
        found.append(index)
        schedule.synchronised(index, seconds, period, every_round=False)
    return found


def test_ranks_synchronise_before_the_first_round_and_then_by_time():
    # 10 ms a round would be five of them, but twice as many as before is the most; then 24 ms a round are 2.1 of them.
    assert rounds_synchronised([0.01, 0.02, 0.04, 0.12, 0.048]) == [10, 11, 13, 17, 22, 24]


def test_schedule_does_not_trust_the_first_rounds_which_return_before_they_end():
    assert rounds_synchronised([1e-6, 2e-6, 1.0, 1.0]) == [10, 11, 13, 17, 18]


def test_ranks_that_wait_for_data_synchronise_before_every_round():
    schedule = SynchronisationSchedule(0)
    for index in range(5):
        assert schedule.is_due(index)
        schedule.synchronised(index, 0.0001, 3, every_round=True)


def test_ranks_synchronise_whole_averaging_periods_apart():
    # 10 ms a round are 1.67 periods of three; two, which are six rounds, are no more than twice as many.
    assert rounds_synchronised([0.03, 0.06, 0.6], period=3, first=0) == [0, 3, 9, 15]


def test_agree_adds_what_ranks_found_by_comparing_gradients():
    own = Report(1.0, gradient_variance=2.0, squared_gradient=-0.5, num_compared=3)
    other = Report(1.0, gradient_variance=1.0, squared_gradient=1.5, num_compared=1)
    assert agree([own, other, Report(1.0)]).compared == (3.0, 1.0, 4)
