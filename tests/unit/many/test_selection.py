"""Ensemble selection, against every ensemble that there is, and by what models say themselves."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import Member
from crossbow_py.errors import UserError
from crossbow_py.many.selection import greedy_selection
from tests.unit.many.test_train_many import TEST, train


def squares_to(targets):
    return lambda means: [float(own) for own in (means - targets).square().mean(1)]


def test_selection_ends_at_what_is_best_together_and_weighs_by_repetition():
    targets = torch.tensor([1.0, 2.0, 3.0])
    off_by = torch.tensor([[0.3, 0.3, 0.3], [-0.6, -0.6, -0.6], [2.0, -2.0, 2.0]])  # 2 · the first + the second = 0
    chosen = greedy_selection(targets + off_by, squares_to(targets), 6)
    assert sorted(chosen) == [0, 0, 1] and chosen[0] == 0
    every = itertools.chain(*(itertools.combinations_with_replacement(range(3), n) for n in range(1, 7)))
    best = min(every, key=lambda own: float(off_by[list(own)].mean(0).square().mean()))
    assert np.isclose(float(off_by[chosen].mean(0).square().mean()), float(off_by[list(best)].mean(0).square().mean()))


def test_models_whose_predictions_are_not_finite_are_never_selected():
    predictions = torch.tensor([[torch.nan, 1.0], [5.0, 5.0], [torch.inf, 2.0]])
    assert greedy_selection(predictions, squares_to(torch.ones(2)), 3) == [1]


def test_selected_members_have_what_their_modules_have_together():
    found = train([Member(seed=n) for n in range(4)], validation_data=TEST, test_data=TEST)
    chosen = found.selected(5)
    together, everyone = found.ensemble(chosen), found.ensemble()
    with torch.no_grad():
        mean = torch.stack([each.model(TEST[0]).softmax(1) for each in chosen]).mean(0)
    assert together is not None and everyone is not None
    assert together["loss"] == pytest.approx(float(nn.functional.nll_loss(mean.log(), TEST[1])), rel=1e-5)
    assert together["loss"] <= min(each.test_loss for each in found) + 1e-6  # selected by the same samples here
    assert found.ensemble(found.selected(1)) is not None
    with pytest.raises(UserError, match="members of these results"):
        found.ensemble([copy.copy(chosen[0])])
    assert found.selected(1) == [min(found, key=lambda each: each.validation_loss)]


def test_members_without_common_validation_samples_are_refused():
    found = train([Member(seed=n, validation=[n, n + 1]) for n in range(2)], validation_data=TEST)
    assert any("validation_data measures no member" in note for note in found.notes)
    with pytest.raises(UserError, match="validation samples that all of them share"):
        found.selected()
    with pytest.raises(UserError, match="most of 1 or more"):
        found.selected(0)
