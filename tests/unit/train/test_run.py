"""Counters of a run: epoch sums, best values, and their form in a checkpoint."""

from __future__ import annotations

import math

import pytest

from crossbow_py.engine.rounds import Round, RoundOutcome
from crossbow_py.train.train_state import TrainState


def outcome(losses, correct, finite):
    result = RoundOutcome(Round(0, (0,) * len(losses), (0.1,) * len(losses), None))
    result.losses, result.num_correct, result.finite = losses, correct, finite
    return result


def test_absorb_averages_losses_over_learners_and_rounds_and_leaves_gated_ones_out():
    state = TrainState()
    assert math.isnan(state.train_loss) and state.train_accuracy(4) is None
    state.absorb(outcome([1.0, 3.0], [2, 4], [True, True]))
    state.absorb(outcome([math.nan, 5.0], [0, 3], [False, True]))
    assert state.train_loss == pytest.approx(3.0)
    assert state.train_accuracy(batch_size=4) == pytest.approx(9 / 12)
    state.absorb(outcome([3.0, 3.0], [None, None], [True, True]))  # of a task without classes
    assert (state.train_loss, state.train_accuracy(4)) == (pytest.approx(3.0), None)


def test_note_evaluation_keeps_the_last_the_best_and_the_first_time_at_the_target():
    state = TrainState()
    for accuracy, elapsed_s in [(None, 0.5), (0.7, 1.0), (0.9, 2.0), (0.95, 3.0), (0.8, 4.0)]:
        state.elapsed_s = elapsed_s
        state.note_evaluation(accuracy, 2 * elapsed_s, 0.9)
    assert (state.best_accuracy, state.time_to_accuracy_s) == (0.95, 2.0)
    assert (state.last_accuracy, state.last_loss) == (0.8, 8.0)
    untargeted = TrainState()
    untargeted.note_evaluation(1.0, 0.1, None)
    assert (untargeted.best_accuracy, untargeted.time_to_accuracy_s) == (1.0, None)


def test_absorb_notes_gated_learners_once_until_they_are_reseeded():
    state = TrainState()
    state.absorb(outcome([1.0, math.nan], [1, 0], [True, False]))
    state.absorb(outcome([math.nan, math.nan], [0, 0], [False, False]))
    assert state.non_finite_learners == {1: 0, 0: 0}


@pytest.mark.parametrize(("samples_seen", "closed"), [(10, 1), (13, 1), (32, 3)])
def test_start_sums_counts_every_epoch_passed_and_empties_the_sums(samples_seen, closed):
    state = TrainState(samples_seen=samples_seen, loss_sum=4.0, num_losses=2, num_correct=3.0)
    state.start_sums(samples_per_epoch=10)
    assert (state.closed_epochs, state.loss_sum, state.num_losses, state.num_correct) == (closed, 0.0, 0, 0.0)


def test_plain_values_come_back_whatever_a_newer_or_older_version_had():
    state = TrainState(round_index=3, samples_seen=24, best_accuracy=0.5)
    plain = state.to_plain()
    assert TrainState.from_plain(plain) == state
    del plain["num_reseeded"]
    assert TrainState.from_plain({**plain, "unheard_of": 1}) == state
