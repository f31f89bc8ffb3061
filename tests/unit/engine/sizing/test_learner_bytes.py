"""What learners need, by what it is for."""

from __future__ import annotations

import pytest

from crossbow_py.engine.sizing.learner_bytes import learner_bytes, predicted_bytes


def test_learner_in_bf16_has_a_shadow_and_float32_rows():
    own = learner_bytes(1000, 30, 2, master_bytes=4, compute_bytes=2, activations=500)
    assert (own.weights, own.gradients, own.corrections, own.state) == (4000, 4000, 4000, 8000)
    assert (own.shadow, own.buffers, own.activations) == (2000, 120, 500)
    assert (own.row, own.whole) == (22_120, 22_620)
    assert learner_bytes(1000, 30, 1, master_bytes=4, compute_bytes=4, activations=0).shadow == 0


def test_prediction_counts_activations_of_learners_that_run_at_once():
    own = learner_bytes(1000, 0, 1, master_bytes=4, compute_bytes=4, activations=500)
    assert predicted_bytes(own, 4, at_once=4, fixed=7) == 7 + 3 * 4000 + 4 * 16_000 + 4 * 500
    assert predicted_bytes(own, 4, at_once=1) == 3 * 4000 + 4 * 16_000 + 500
    with pytest.raises(AssertionError, match="at once"):
        predicted_bytes(own, 4, at_once=5)
