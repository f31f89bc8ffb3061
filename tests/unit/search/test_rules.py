"""What a search trains on in all, counted by hand."""

from __future__ import annotations

from crossbow_py.search.hyperband import make_brackets
from crossbow_py.search.rules import planned_epochs, total_samples


def test_samples_of_a_search_are_those_of_every_rung_from_the_one_before() -> None:
    brackets = make_brackets("hyperband", num_trials=None, min_epochs=1, max_epochs=9, eta=3)
    # 9 trials for 1 epoch, 3 for 2 more, 1 for 6 more; 5 for 3, 1 for 6 more; 3 for 9.
    assert total_samples(brackets, 40) == 40 * ((9 + 6 + 6) + (15 + 6) + 27)
    assert planned_epochs(brackets) == (9 + 6 + 6) + (15 + 6) + 27
