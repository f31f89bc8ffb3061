"""The auto-tuner: scripted throughputs with decisions worked out by hand, and what holds for every throughput."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerState, Decision
from crossbow_py.engine.goodput import NoiseScale

START = AutoTunerState()
POSITIVE = st.floats(min_value=1e-3, max_value=1e9)


def quick(max_learners: int = 8) -> AutoTuner:
    """Every window is a measurement, so that scripts stay short."""
    return AutoTuner(max_learners=max_learners, min_gain=0.05, windows=1, warm_up_windows=0)


def follow(
    tuner: AutoTuner, values: Iterable[float], state: AutoTunerState = START
) -> tuple[AutoTunerState, list[Decision]]:
    decisions = []
    for value in values:
        state, decision = tuner.observe(state, value)
        decisions.append(decision)
        assert decision.num_learners == state.num_learners
    return state, decisions


def steps(decisions: list[Decision]) -> list[int]:
    """The numbers of learners; that actions follow from these holds for every throughput, see below."""
    return [decision.num_learners for decision in decisions]


def settled(num_learners: int, images_per_s: float, **more) -> AutoTunerState:
    """With one measurement."""
    return AutoTunerState(num_learners, "settled", measured=((num_learners, images_per_s),), **more)


def settle(
    tuner: AutoTuner, throughput: Callable[[int], float], state: AutoTunerState = START
) -> tuple[AutoTunerState, list[Decision]]:
    """Follow a throughput that depends on the number of learners until the tuner settles, within its bound."""
    decisions = []
    # Every count twice, as growing may start again, and the choice once more.
    for _ in range((2 * len(tuner.counts) + 1) * (tuner.windows + tuner.warm_up_windows)):
        state, decision = tuner.observe(state, throughput(state.num_learners))
        decisions.append(decision)
        if state.phase == "settled":
            return state, decisions
    raise AssertionError(f"not settled within {len(decisions)} windows")


# --- the counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_learners", "counts"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 3, 4, 5)), (8, (1, 2, 3, 4, 6, 8)), (32, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))],
)
def test_counts_up_to_a_limit_are_powers_of_two_their_halves_between_and_the_limit(max_learners, counts):
    assert AutoTuner(max_learners=max_learners).counts == counts


# --- decisions, worked out by hand ------------------------------------------------------------------------------------

SCRIPTS = {
    # 4 learners gain 3.3 % on 3, 6 gain 1.7 % on 3: two in a row that are not worth it. 300 * 1.05 >= 310.
    "plateau": (8, START, [100, 200, 300, 310, 305, 300], [2, 3, 4, 6, 3, 3]),
    # 4 learners gain 20 % on 2; 6 and 8 lose.
    "dip at three looks one count further": (8, START, [100, 200, 180, 240, 230, 220], [2, 3, 4, 6, 8, 4]),
    "cliff goes back at once": (8, START, [100, 190, 60], [2, 3, 2]),
    "loss at two ends with one": (8, START, [100, 90, 85], [2, 3, 1]),
    # 4 % a count: 2 is not worth it, 3 gains 8.2 % on 1; 4 is not, 6 gains 8.2 % on 3; 8 is the last. 6 is within 5 %.
    "small gains that add up": (8, START, [100 * 1.04**n for n in range(6)], [2, 3, 4, 6, 8, 6]),
    "gain up to the limit": (2, START, [100, 190], [2, 2]),
    "single learner allowed": (1, START, [100], [1]),
    # 3 learners lose 20 % on 4, 2 are within 5 % of the best, 1 is not: 2.
    "drop with a dip below": (8, settled(4, 400.0), [200, 200, 160, 195, 130], [4, 3, 2, 1, 2]),
    # It settles for 200: the same again is no news, and with nothing taken away there is nothing to try. A second drop
    # has to last for four measurements.
    "drop that fewer do not mend": (8, settled(4, 400.0), [200, 200, 150, 110, *[100] * 4], [4, 3, 2, 4, 4, 4, 4, 3]),
    "drop that stays": (8, settled(4, 400.0), [200, 200, 150, 110, *[200] * 100], [4, 3, 2, *[4] * 101]),
    # 4 % a count: 6 are within 5 % of the best, which stays the 200 with 8; 4 and 3 are not.
    "small losses that add up": (8, settled(8, 400.0), [200, 200, 192, 184, 177], [8, 6, 4, 3, 6]),
    "a drop under way puts off a trial": (8, settled(1, 100.0, before_drop=2), [100, 50, 100], [1, 1, 2]),
    # 3 learners are the device's now: 450 is 12.5 % more than 400; 460 and 470 are not worth it.
    "lasting rise": (8, START, [100, 200, 190, 195, 200, 400, 400, 450, 460, 470], [2, 3, 4, 2, 2, 2, 3, 4, 6, 3]),
    "slowed down again, no third look": (3, START, [100, 200, 150, 100, 90], [2, 3, 2, 3, 2]),
    # Never two bad ones in a row, nor two in the same direction.
    "drift that does not last": (2, START, [100, 190, *[50, 190, 50, 300, 50, 300, 190] * 20], [2] * 142),
}


@pytest.mark.parametrize(("limit", "state", "throughputs", "counts"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_observe_decides_as_worked_out_by_hand(limit, state, throughputs, counts):
    assert steps(follow(quick(limit), throughputs, state)[1]) == counts


# --- windows ----------------------------------------------------------------------------------------------------------


def test_observe_windows_after_a_change_are_dropped_and_the_median_of_the_next_counts():
    # 1 learner: 5 is dropped, the median of 90, 300, 100 is 100. 2 learners: 1 is dropped, the median is 150.
    state, decisions = follow(AutoTuner(max_learners=2), [5, 90, 300, 100, 1, 150, 10, 160])
    assert steps(decisions) == [1, 1, 1, 2, 2, 2, 2, 2]
    assert (state.phase, state.measured) == ("settled", ((1, 100), (2, 150)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_observe_what_is_no_throughput_is_ignored(value):
    for before in ([], [100.0], [100.0, 200.0]):
        state, _ = follow(AutoTuner(), before)
        assert AutoTuner().observe(state, value) == (state, Decision("stay", 1))


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "throughputs", "reasons"),
    [
        (
            8,
            [3600, 4120, 4130, 4125, 4082],
            [
                "1 → 2 learners: 3,600 images/s with 1.",
                "2 → 3 learners: 4,120 images/s with 2, up 14 % on 1.",
                "3 → 4 learners: 4,130 images/s with 3, up 0 % on 2; looks one count further.",
                "4 → 2 learners: 4,120 images/s with 2, the fewest within 5 % of the best; measures again.",
                "Settled on 2 learners: 4,082 images/s with 2, down 1 % since it was measured first.",
            ],
        ),
        (
            2,
            [1.2345, 1.2, 1.25],
            [
                "1 → 2 learners: 1.23 images/s with 1.",
                "2 → 1 learner: 1.23 images/s with 1, the fewest within 5 % of the best; measures again.",
                "Settled on 1 learner: 1.25 images/s with 1, up 1 % since it was measured first.",
            ],
        ),
    ],
    ids=["fast", "slow, to three digits"],
)
def test_observe_every_decision_gives_its_reason(limit, throughputs, reasons):
    assert [decision.reason for decision in follow(quick(limit), throughputs)[1]] == reasons


# --- memory -----------------------------------------------------------------------------------------------------------


def test_resumed_under_the_same_limit_goes_on_and_may_try_what_memory_did_not_hold():
    state = AutoTunerState(3, "settled", 5, (1.0,), ((3, 300.0),), out_of_memory_at=4, drifted=-1, num_searches_again=2)
    expected = AutoTunerState(3, "settled", 5, (1.0,), ((3, 300.0),), drifted=-1, num_searches_again=2)
    assert quick().resumed(state, former_limit=8) == expected


FOUR = ((1, 100.0), (2, 190.0), (4, 300.0), (8, 400.0))


@pytest.mark.parametrize(
    ("state", "former", "limit", "expected", "then", "counts"),
    [
        (AutoTunerState(8, "settled", measured=FOUR), 8, 3, (2, "settled", FOUR[:2]), [], []),
        (settled(8, 400.0), 8, 4, (4, "shrinking", ()), [300, 200, 150], [3, 2, 4]),
        (AutoTunerState(4, "settled", measured=FOUR[1:3]), 4, 8, (4, "growing", ()), [400, 600, 800], [6, 8, 8]),
    ],
    ids=["lower: the best left", "lower, nothing measured below: downwards", "higher: grows from where it was"],
)
def test_resumed_under_another_limit(state, former, limit, expected, then, counts):
    found = quick(limit).resumed(state, former)
    assert (found.num_learners, found.phase, found.measured) == expected
    assert steps(follow(quick(limit), then, found)[1]) == counts


def test_resumed_while_measuring_its_choice_again_under_a_lower_limit_settles_on_it():
    state, _ = follow(quick(max_learners=4), [100, 200, 150, 200])
    assert (state.phase, state.num_learners) == ("checking", 2)
    found = quick(max_learners=2).resumed(state, former_limit=4)
    state, decisions = follow(quick(max_learners=2), [100], found)
    assert (steps(decisions), state.phase) == ([2], "settled")


@pytest.mark.parametrize("again", [[], [100]], ids=["measuring again", "settled"])
def test_resumed_under_a_higher_limit_is_a_search_that_measures_its_choice_again(again):
    state, _ = follow(quick(max_learners=2), [100, 101, *again])
    found = quick(max_learners=4).resumed(state, former_limit=2)
    assert (found.num_learners, found.phase, found.measured) == (1, "growing", ())
    state, decisions = follow(quick(max_learners=4), [100, 101, 102, 100], found)
    assert steps(decisions) == [2, 3, 1, 1]


def test_time_that_counts_for_several_windows_is_a_measurement_sooner():
    tuner = AutoTuner()
    state, first = tuner.observe(START, 100.0, 5)  # warms up
    state, second = tuner.observe(state, 110.0, 3)
    assert (first.action, second.action, state.measured) == ("stay", "grow", ((1, 110.0),))


@pytest.mark.parametrize(
    ("limit", "start", "throughputs", "count", "phase", "measured"),
    [
        (8, START, [100, 200, 190], 2, "settled", ((1, 100), (2, 200), (3, 190))),
        (4, START, [100, 200, 150, 200], 1, "settled", ((1, 100),)),
        (4, START, [100, 200, 300, 400], 3, "settled", ((1, 100), (2, 200), (3, 300))),
        (8, settled(4, 400.0), [], 3, "growing", ()),
    ],
    ids=["beyond one not worth it", "measuring again", "settled", "nothing smaller was measured"],
)
def test_out_of_memory_goes_to_the_best_smaller_count(limit, start, throughputs, count, phase, measured):
    tuner = quick(limit)
    state, decision = tuner.out_of_memory(follow(tuner, throughputs, start)[0])
    assert (decision.action, decision.num_learners, state.phase, state.measured) == ("shrink", count, phase, measured)


def test_out_of_memory_at_four_goes_back_to_three_and_never_tries_four_again():
    tuner = quick()
    state, _ = follow(tuner, [100, 200, 300])
    assert state.num_learners == 4
    state, decision = tuner.out_of_memory(state)
    assert decision == Decision("shrink", 3, "4 → 3 learners: memory does not hold 4.")
    # Twice the throughput for two windows would make it grow, were there anything to grow to.
    state, decisions = follow(tuner, [600] * 100, state)
    assert steps(decisions) == [3] * 100
    assert [decision.reason for decision in decisions if decision.reason] == [
        "3 learners still: 600 images/s with 3, up 100 % since it settled."
    ]


def test_out_of_memory_at_one_learner_is_the_callers_to_report():
    with pytest.raises(AssertionError, match="which the caller has to report"):
        quick().out_of_memory(START)


# --- drift ------------------------------------------------------------------------------------------------------------


def test_observe_neighbour_that_comes_and_goes_shrinks_and_grows_again():
    tuner = quick(max_learners=2)
    state, _ = follow(tuner, [100, 190])
    # Two measurements of half the throughput: 1 learner does as well (94 * 1.05 >= 95), so it stays with 1.
    state, decisions = follow(tuner, [95, 95, 94], state)
    assert steps(decisions) == [2, 1, 1]
    assert decisions[1].reason == "2 → 1 learner: 95 images/s with 2, down 50 % since it settled."
    # One learner is as fast with and without a neighbour: only trying shows that it has gone. The wait is 4 by now.
    state, decisions = follow(tuner, [100, 100, 100, 100, 190], state)
    assert steps(decisions) == [1] * 3 + [2, 2]
    assert decisions[3].reason == "1 → 2 learners: 100 images/s with 1, looks whether more pay again."
    # Back where it was before the drop, it tries no more.
    assert steps(follow(tuner, [190] * 200, state)[1]) == [2] * 200


def test_observe_neighbour_that_stays_is_tried_ever_more_rarely():
    tuner = quick(max_learners=2)
    state, _ = follow(tuner, [100, 190, 95, 95, 94])
    at = []
    for window in range(400):
        state, decision = tuner.observe(state, {1: 94, 2: 95}[state.num_learners])
        at += [window] if decision.action == "grow" else []
    waits = [after - before for before, after in itertools.pairwise(at)]
    # 8, 16, 32, 64, 64, ... settled measurements, and the windows that measured 2 learners and 1 again.
    assert waits == [10, 18, 34, 66, 66, 66, 66, 66]


def test_observe_second_drop_remembers_the_learners_before_the_first():
    state = settled(2, 200.0, before_drop=4)
    state, decisions = follow(quick(), [100, 100, 99], state)
    assert steps(decisions) == [2, 1, 1]
    assert state.before_drop == 4


def test_observe_drop_that_took_learners_memory_no_longer_holds_tries_none_and_says_nothing():
    state = settled(1, 100.0, before_drop=2, out_of_memory_at=2)
    assert follow(quick(), [100] * 100, state)[1] == [Decision("stay", 1)] * 100


def test_observe_drop_at_one_learner_only_takes_note():
    state, _ = follow(quick(max_learners=1), [100])
    state, decisions = follow(quick(max_learners=1), [50, 50], state)
    assert decisions[1] == Decision("stay", 1, "1 learner still: 50 images/s with 1, down 50 % since it settled.")
    assert state.measured == ((1, 50),)


# --- slower while it searched -----------------------------------------------------------------------------------------


def test_observe_machine_that_slowed_down_while_growing_grows_on_from_the_choice():
    # Twice the learners, twice the throughput, but half the speed from 3 learners on: 2 with 100 lose to 3 with 150.
    state, decisions = follow(quick(max_learners=4), [100, 200, 150, 200, 100, 150, 200])
    assert steps(decisions) == [
        2, 3, 4, 2, 3, 4, 4,
    ]  # fmt: skip
    assert decisions[4].reason == "2 → 3 learners: 100 images/s with 2, down 50 % since it was measured first."
    assert (state.phase, state.measured) == ("settled", ((2, 100), (3, 150), (4, 200)))


def test_observe_choice_measured_again_is_what_drift_is_measured_from():
    state, _ = follow(quick(max_learners=3), [100, 200, 150, 160])
    assert (state.phase, state.num_learners, state.measured[-1]) == ("settled", 2, (2, 160))
    assert steps(follow(quick(max_learners=3), [130] * 50, state)[1]) == [2] * 50


def test_observe_one_bad_window_in_three_changes_nothing():
    tuner = AutoTuner(max_learners=2)
    state, _ = settle(tuner, {1: 100.0, 2: 190.0}.__getitem__)
    _, decisions = follow(tuner, [190, 190, 10] * 50, state)
    assert {decision.action for decision in decisions} == {"stay"}


# --- what holds for every throughput ----------------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.one_of(POSITIVE, st.floats(), st.none()), max_size=150))
def test_observe_any_numbers_stays_within_the_limits_and_round_trips(max_learners, values):
    tuner, state, too_many = AutoTuner(max_learners=max_learners, windows=1), START, max_learners + 1
    for value in values:
        before = state
        if value is None:
            if state.num_learners == 1:
                continue
            too_many = min(too_many, state.num_learners)
            state, decision = tuner.out_of_memory(state)
            assert decision.action == "shrink"
        else:
            state, decision = tuner.observe(state, value)
            assert tuner.observe(before, value) == (state, decision)
        assert 1 <= decision.num_learners == state.num_learners < too_many
        assert decision.num_learners in tuner.counts
        change = decision.num_learners - before.num_learners
        assert decision.action == ("grow" if change > 0 else "shrink" if change < 0 else "stay")
        assert decision.reason or decision.action == "stay"
        assert AutoTunerState.from_plain(json.loads(json.dumps(state.to_plain()))) == state


@given(st.floats(1, 1e6), st.lists(st.floats(1.06, 2.0), max_size=9), st.lists(st.floats(0.3, 1.0), min_size=9))
def test_observe_curve_that_rises_then_falls_ends_on_the_fewest_near_its_peak(first, rises, falls):
    tuner = AutoTuner(max_learners=32)
    curve = [first]
    for factor in (rises + falls)[: len(tuner.counts) - 1]:
        curve.append(curve[-1] * factor)
    throughput = dict(zip(tuner.counts, curve, strict=True))
    state, _ = settle(tuner, throughput.__getitem__)
    assert state.num_learners == next(count for count in tuner.counts if throughput[count] * 1.05 >= max(curve))


@given(st.lists(POSITIVE, min_size=6, max_size=6))
def test_observe_any_curve_ends_on_the_fewest_learners_near_the_best_it_measured(curve):
    tuner = AutoTuner()
    throughput, visited = dict(zip(tuner.counts, curve, strict=True)), set()
    state, _ = settle(tuner, lambda count: visited.add(count) or throughput[count])
    best = max(throughput[count] for count in visited)
    assert state.num_learners == min(count for count in visited if throughput[count] * 1.05 >= best)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.lists(st.floats(0.8, 1.5), min_size=5, max_size=5))
def test_observe_stationary_noise_of_ten_percent_once_settled_changes_nothing(seed, factors):
    tuner, numbers = AutoTuner(), random.Random(seed)
    curve = [1000.0]
    for factor in factors:
        curve.append(curve[-1] * factor)
    throughput = dict(zip(tuner.counts, curve, strict=True))
    state, _ = settle(tuner, lambda count: throughput[count] * numbers.uniform(0.9, 1.1))
    noise = (throughput[state.num_learners] * numbers.uniform(0.9, 1.1) for _ in range(600))
    _, decisions = follow(tuner, noise, state)
    assert {decision.action for decision in decisions} == {"stay"}


# --- settings and checkpoints -----------------------------------------------------------------------------------------


def test_from_plain_of_an_older_checkpoint_starts_what_is_missing_at_its_default():
    assert AutoTunerState.from_plain({"num_learners": 3, "unknown": 1}) == AutoTunerState(num_learners=3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_learners", 0), ("min_gain", -0.1), ("windows", 0), ("drift", 0), ("drift", 1), ("warm_up_windows", -1)],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(UserError, match=setting):
        AutoTuner(**{setting: value})


# --- goodput ----------------------------------------------------------------------------------------------------------


def noise(scale: float, batch_size: int = 32) -> NoiseScale:
    return NoiseScale(batch_size, variance=scale, squared_gradient=1.0, count=100)


def observe(tuner: AutoTuner, state: AutoTunerState, rates: list[float], at: float) -> tuple[AutoTunerState, list[str]]:
    said = []
    for rate in rates:
        state, decision = tuner.observe(state, rate, noise=noise(at))
        said.append(decision.reason)
    return state, said


def test_learners_that_waste_half_of_their_samples_are_not_tried() -> None:
    # φ = 64, b = 32: 96 / (64 + 32·K) is 0.75 with 2, 0.6 with 3, 0.5 with 4 and 0.375 with 6.
    state, said = observe(quick(), START, [100, 200, 300, 400], 64)
    assert (state.num_learners, state.phase, state.noise_scale) == (4, "settled", 64)
    assert said[1] == "2 → 3 learners: goodput 150 with 2 (200 images/s × 0.75), up 50 % on 1."
    assert said[3].startswith("Settled on 4 learners: goodput 200 with 4 (400 images/s × 0.50), the fewest within 5 %")


def test_most_images_a_second_are_not_the_most_progress() -> None:
    # 100, 97.5 and 84 effective images/s, where throughput grows by 30 and 40 %.
    state, _ = observe(quick(), START, [100, 130, 140, 100], 64)
    assert (state.num_learners, state.phase) == (1, "settled")
    throughput = AutoTuner(max_learners=8, min_gain=0.05, windows=1, warm_up_windows=0, objective="throughput")
    assert observe(throughput, START, [100, 130, 140, 120, 100, 140], 64)[0].num_learners == 3


def test_nothing_is_decided_until_the_noise_is_known() -> None:
    few = NoiseScale(32, variance=64.0, squared_gradient=1.0, count=3)
    state, _ = quick().observe(START, 100, noise=few)  # with two a sample is worth half as much at least
    for _ in range(5):
        state, decision = quick().observe(state, 200, noise=few)
        assert decision == Decision("stay", 2)
    assert quick().observe(state, 200, noise=noise(64))[0].num_learners == 3
    many = AutoTuner(windows=3, warm_up_windows=0)
    state = dataclasses.replace(START, num_learners=2)
    for rate in (1, 1, 1, 100, 100):  # the last three windows count
        state, _ = many.observe(state, rate, num_windows=5, noise=few)
        assert len(state.recent) == 2
    state, decision = many.observe(state, 100, noise=noise(64))
    assert decision.reason == "2 → 3 learners: goodput 75 with 2 (100 images/s × 0.75)."


def test_learners_come_as_the_noise_rises() -> None:
    state, _ = observe(quick(), START, [100, 200, 300, 400], 64)
    state, said = observe(quick(), state, [400, 410], 80)  # efficiencies of 6 to 4 learners: 0.77 for 0.75
    assert said == ["", ""]
    # 0.875 for 0.75
    state, said = observe(quick(), state, [400, 600], 320)
    assert said[0] == (
        "4 → 6 learners: goodput 314 with 4 (400 images/s × 0.79), the gradient noise scale is 320 samples."
    )
    assert state.num_learners == 8
    state, _ = observe(quick(), state, [800], 320)
    assert (state.num_learners, state.phase, state.noise_scale) == (8, "settled", 320)


def test_learners_go_as_the_noise_falls_without_a_search() -> None:
    state, _ = observe(quick(), START, [100, 200, 300, 330], 10_000)
    while state.phase != "settled":
        state, _ = observe(quick(), state, [{6: 340.0, 8: 345.0, 4: 330.0, 3: 300.0}[state.num_learners]], 10_000)
    assert state.num_learners == 4
    # 132 / 172, 132 / 196 and 132 / 228: 100, 153, 202 and 191
    state, said = observe(quick(), state, [330], 100)
    (why,) = said
    moved = "as the gradient noise scale is 100 samples"
    assert why == f"4 → 3 learners: goodput 202 with 3 (300 images/s × 0.67), {moved}."
    assert (state.num_learners, state.phase) == (3, "settled")
    assert observe(quick(), state, [300, 300, 300], 100)[0].num_learners == 3


def test_learners_that_come_to_waste_their_samples_go_though_nothing_smaller_was_measured() -> None:
    state = AutoTunerState(num_learners=8, phase="settled", measured=((8, 800.0),), noise_scale=1000.0)
    state, (said,) = observe(quick(), state, [800], 32)  # 64 / 288 with 8
    assert said == "8 → 6 learners: goodput 178 with 8 (800 images/s × 0.22), the gradient noise scale is 32 samples."
    rates = {6: 700.0, 4: 600.0, 3: 500.0, 2: 400.0, 1: 200.0}
    for _ in range(40):
        state, _ = observe(quick(), state, [rates[state.num_learners]], 32)
    assert (state.num_learners, state.phase) == (2, "settled")  # 64 / 96 of 400


def test_learners_that_waste_samples_and_are_the_best_stay() -> None:
    rates = {8: 800.0, 6: 200.0, 4: 150.0, 3: 120.0, 2: 90.0, 1: 50.0}
    state = AutoTunerState(num_learners=8, phase="settled", measured=((8, 800.0),), noise_scale=1000.0)
    seen = []
    for _ in range(40):
        state, _ = observe(quick(), state, [rates[state.num_learners]], 100)  # 132 / 356 with 8
        seen.append(state.num_learners)
    assert set(seen[-30:]) == {8}


def test_devices_count_and_noise_that_hides_the_gradient_makes_throughput_count() -> None:
    tuner = AutoTuner(max_learners=8, min_gain=0.05, windows=1, warm_up_windows=0, num_devices=4)
    assert observe(tuner, START, [100], 64)[0].phase == "settled"  # 2 on each of 4 devices: 96 / 320
    state, (_, why) = observe(quick(), START, [100, 200], math.inf)
    assert (state.num_learners, why) == (3, "2 → 3 learners: goodput 200 with 2 (200 images/s × 1.00), up 100 % on 1.")


def test_memory_that_ran_out_goes_back_to_the_best_by_goodput() -> None:
    state, _ = observe(quick(), START, [100, 150, 160], 64)
    assert state.num_learners == 4
    assert quick().out_of_memory(state, noise(64))[0].num_learners == 2
    assert quick().out_of_memory(state)[0].num_learners == 3


@example([(1.0, 0.0), (1.0, 32.0), (5.0, 0.0), (1.0, 0.0), (3.0, 0.0), (1.0, 0.0)])  # back to what was better
@given(st.lists(st.tuples(POSITIVE, st.floats(0, 1e6)), min_size=1, max_size=60))
def test_tuner_stays_within_its_counts_whatever_the_noise(script: list[tuple[float, float]]) -> None:
    tuner, state = quick(), START
    for rate, scale in script:
        before, known = state.num_learners, dict(state.measured)
        state, decision = tuner.observe(state, rate, noise=noise(scale))
        assert decision.num_learners == state.num_learners in tuner.counts
        if state.num_learners > before and state.num_learners not in known:
            assert noise(scale).efficiency(state.num_learners) >= 0.5  # type: ignore[operator]
        assert AutoTunerState.from_plain(json.loads(json.dumps(state.to_plain()))) == state
