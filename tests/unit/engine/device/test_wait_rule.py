"""When threads that share an operator spin and when they sleep, by windows worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from crossbow_py.engine.device.wait_rule import WaitState, Window, observe


def follow(state: WaitState, rates: list[float], others: float | None = 0.0, learners: int = 2) -> WaitState:
    """The state after windows of these throughputs; nothing may be said meanwhile."""
    for rate in rates:
        state, said = observe(state, Window(rate, learners, others))
        assert said == ""
    return state


@pytest.fixture
def quiet() -> WaitState:
    """Of a run that has shown 1,000 images/s: its first window, with learners it does not know, is dropped."""
    return follow(WaitState(), [10.0, 990.0, 1000.0, 1010.0])


@pytest.fixture
def asleep(quiet: WaitState) -> WaitState:
    """Three windows collapsed, to 100 images/s; a trial of sleep gave 800, and is kept."""
    trial = follow(quiet, [90.0, 100.0, 110.0], others=1.0)
    state, said = observe(follow(trial, [790.0, 800.0], others=1.0), Window(810.0, 2, 1.0))
    assert "Training ran at 100 images/s" in said and "gives 800 images/s and the same results" in said
    return state


def test_quiet_run_spins_for_ever_without_a_trial(quiet: WaitState) -> None:
    state = follow(quiet, [1000.0, 900.0, 1100.0] * 100)
    assert (state.sleeps, state.num_trials, state.best) == (False, 0, 1000.0)


def test_collapse_in_three_windows_starts_a_trial_whatever_others_hold(quiet: WaitState) -> None:
    two = follow(quiet, [499.0, 499.0], others=None)
    assert not two.on_trial
    three = follow(two, [499.0], others=None)
    assert (three.sleeps, three.on_trial, three.usual) == (True, True, 499.0)


def test_half_the_throughput_or_a_single_slow_window_is_no_collapse(quiet: WaitState) -> None:
    assert follow(quiet, [500.0, 500.0, 500.0, 1000.0, 20.0, 1000.0, 20.0, 1000.0]).num_trials == 0


@pytest.mark.parametrize(("slept", "kept"), [(124.0, False), (125.0, True)])
def test_sleep_is_kept_when_it_is_a_quarter_faster(quiet: WaitState, slept: float, kept: bool) -> None:
    trial = follow(quiet, [100.0] * 3)
    state, said = observe(follow(trial, [slept, slept]), Window(slept, 2, 0.0))
    assert (state.sleeps, state.on_trial, bool(said)) == (kept, False, kept)


def test_trial_of_sleep_is_not_given_up_for_a_slow_first_window(quiet: WaitState) -> None:
    trial = follow(quiet, [100.0] * 3)
    state, said = observe(follow(trial, [10.0, 900.0]), Window(300.0, 2, 1.0))
    assert state.sleeps and "gives 300 images/s" in said


def test_trial_that_gains_nothing_makes_the_slow_throughput_the_usual_one(quiet: WaitState) -> None:
    state = follow(quiet, [100.0] * 6)
    assert (state.sleeps, state.on_trial, state.best) == (False, False, 100.0)
    assert follow(state, [100.0, 60.0, 100.0] * 50).num_trials == 1
    assert follow(state, [49.0] * 3).on_trial


def test_run_that_begins_on_busy_cores_tries_sleep_without_a_throughput_to_compare_with() -> None:
    state = follow(WaitState(), [100.0] * 4, others=0.5)
    assert (state.sleeps, state.on_trial, state.usual) == (True, True, 100.0)
    assert follow(WaitState(), [100.0] * 50, others=0.49).num_trials == 0


def test_trials_for_a_load_that_does_no_harm_are_ever_further_apart() -> None:
    state, begun = WaitState(), []
    for window in range(1200):
        before = state.num_trials
        state = follow(state, [100.0], others=1.0)
        begun += [window] if state.num_trials > before else []
    # A trial takes 3 windows, and from its end 2, 4, 8, ... and at last 256 pass, of which 3 have to be there.
    assert begun[:4] == [3, 9, 16, 27]
    assert [after - before for before, after in itertools.pairwise(begun[-3:])] == [259, 259]


def test_load_that_goes_has_threads_spin_again(asleep: WaitState) -> None:
    assert not follow(asleep, [800.0] * 60, others=0.25).on_trial
    trial = follow(asleep, [800.0] * 3, others=0.2)
    assert (trial.sleeps, trial.on_trial, trial.usual) == (False, True, 800.0)
    state, said = observe(follow(trial, [980.0, 990.0]), Window(1000.0, 2, 0.0))
    assert (state.sleeps, state.on_trial, state.best) == (False, False, 990.0)
    assert said.endswith("990 images/s, 800 before.")


def test_trial_of_spinning_that_collapses_ends_with_its_first_window(asleep: WaitState) -> None:
    trial = follow(asleep, [800.0] * 3, others=0.0)
    state = follow(trial, [399.0])
    assert (state.sleeps, state.on_trial, state.num_trials) == (True, False, 2)
    # 4 windows now, after 2.
    assert not follow(state, [800.0] * 3).on_trial
    assert follow(state, [800.0] * 4).on_trial


@pytest.mark.parametrize(("spun", "kept"), [(759.0, False), (760.0, True)])
def test_spinning_is_kept_unless_it_loses_a_twentieth(asleep: WaitState, spun: float, kept: bool) -> None:
    trial = follow(asleep, [800.0] * 3)
    state, said = observe(follow(trial, [spun, spun]), Window(spun, 2, 0.0))
    assert (state.sleeps, state.on_trial, bool(said)) == (not kept, False, kept)


def test_sleeping_threads_try_to_spin_after_long_where_nothing_is_told_of_others(asleep: WaitState) -> None:
    # One trial so far: 64 times 2 windows.
    assert not follow(asleep, [800.0] * 127, others=None).on_trial
    assert follow(asleep, [800.0] * 128, others=None).on_trial


def test_another_number_of_learners_ends_a_trial_and_forgets_what_was_measured(quiet: WaitState) -> None:
    trial = follow(quiet, [100.0] * 3)
    state = follow(trial, [900.0], learners=3)
    assert (state.sleeps, state.on_trial, state.best, state.recent) == (False, False, 0.0, ())
    assert follow(state, [100.0] * 30, learners=3).num_trials == 1


def test_cores_that_others_hold_are_remembered_when_the_number_of_learners_changes() -> None:
    # As the auto-tuner begins: a window with one learner that is dropped, two that are not, and then two learners.
    state = follow(WaitState(), [100.0] * 3, others=1.0, learners=1)
    state = follow(state, [150.0, 200.0], others=1.0)
    assert not state.on_trial
    assert follow(state, [300.0], others=0.4).on_trial is False
    trial = follow(state, [300.0], others=1.0)
    assert (trial.sleeps, trial.on_trial, trial.usual) == (True, True, 250.0)


def test_stretch_as_long_as_three_windows_is_a_measurement_by_itself(quiet: WaitState) -> None:
    trial, _ = observe(quiet, Window(7.0, 2, 1.0), num_windows=15)
    assert (trial.sleeps, trial.on_trial, trial.usual) == (True, True, 7.0)
    state, said = observe(trial, Window(100.0, 2, 1.0), num_windows=3)
    assert state.sleeps and not state.on_trial and said
