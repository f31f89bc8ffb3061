"""Influence scores of the attribution experiment, by hand."""

from __future__ import annotations

import numpy as np

from experiments.attribution import run


def test_scores_are_by_how_much_losses_fall_with_a_sample(monkeypatch):
    monkeypatch.setattr(run, "_TRAIN", 3)
    ids = np.array([[0, 1], [1, 2], [0, 1]])
    losses = np.array([[1.0], [4.0], [2.0]])
    # Sample 0: 4 without it, (1 + 2)/2 with it. All models have sample 1. Sample 2: 1.5 without it, 4 with it.
    np.testing.assert_allclose(run.influence(ids, losses), [[2.5], [0.0], [-2.5]])


def test_correlation_is_the_mean_over_test_samples():
    one = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 4.0]])
    assert np.isclose(run.correlation(one, one), 1)
    assert np.isclose(run.correlation(one, one * [2, -1]), 0)
