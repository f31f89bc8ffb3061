"""Trials as records, and the trial that leads, from results written down by hand."""

from __future__ import annotations

from typing import Any, cast

from crossbow_py.search.hyperband import Segment, TrialState, make_brackets
from crossbow_py.search.loop import SearchRules
from crossbow_py.search.outcome import find_leader, trial_records
from crossbow_py.search.study.claims import SegmentResult
from crossbow_py.search.study.study import SharedStudy

# 3 trials at 1 and 3 epochs.
RULES = SearchRules(
    make_brackets("successive_halving", num_trials=3, min_epochs=1, max_epochs=3, eta=3), "accuracy", "none", 0, 1
)
RESULTS = {
    Segment(0, 0): SegmentResult(0.5, None, 1.0, 2.0, "a"),
    Segment(1, 0): SegmentResult(0.75, None, 1.0, 3.0, "a"),
    Segment(1, 1): SegmentResult(0.875, None, 3.0, 4.0, "b"),
    Segment(2, 0): SegmentResult(None, "ValueError: no", worker="b"),
}


class Known:
    """A study that has these results."""

    def __init__(self, results: dict[Segment, SegmentResult]) -> None:
        self.own = results

    def segment_results(self) -> dict[Segment, SegmentResult]:
        return self.own

    def results(self) -> dict[Segment, float | None]:
        return {segment: result.value for segment, result in self.own.items()}

    def sampled(self) -> dict[int, dict[str, Any]]:
        return {trial: self.params(trial) for trial in {segment.trial for segment in self.own}}

    def params(self, trial: int) -> dict[str, Any]:
        return {"seed": trial}


def known(results: dict[Segment, SegmentResult]) -> SharedStudy:
    return cast(SharedStudy, Known(results))


def test_records_have_values_by_epochs_seconds_in_all_and_the_last_worker() -> None:
    first, second, third = trial_records(RULES, known(dict(reversed(RESULTS.items()))))
    assert (first.state, first.values, first.seconds) == (TrialState.PRUNED, {1.0: 0.5}, 2.0)
    assert (second.state, second.rung, second.value) == (TrialState.COMPLETE, 1, 0.875)
    assert (second.values, second.seconds, second.worker) == ({1.0: 0.75, 3.0: 0.875}, 7.0, "b")
    assert (third.state, third.values, third.reason) == (TrialState.FAILED, {}, "ValueError: no")
    assert [record.params for record in (first, second, third)] == [{"seed": trial} for trial in range(3)]


def test_records_of_trials_that_nobody_began_have_no_parameters_and_no_worker() -> None:
    records = trial_records(RULES, known({}))
    assert len(records) == 3
    assert {(record.state, record.params, record.worker) for record in records} == {(TrialState.WAITING, None, None)}


def test_leader_is_at_its_end_only_at_the_last_rung() -> None:
    found = find_leader(RULES, known(RESULTS))
    assert found is not None
    assert (found.trial, found.last, found.epochs, found.value, found.is_at_end) == (1, Segment(1, 1), 3, 0.875, True)
    sooner = find_leader(RULES, known({segment: RESULTS[segment] for segment in (Segment(0, 0), Segment(1, 0))}))
    assert sooner is not None
    assert (sooner.last, sooner.epochs, sooner.value, sooner.is_at_end) == (Segment(1, 0), 1, 0.75, False)
    assert sooner.params == {"seed": 1}


def test_leader_is_nobody_while_there_is_no_value_and_where_all_failed() -> None:
    assert find_leader(RULES, known({})) is None
    assert find_leader(RULES, known({Segment(2, 0): RESULTS[Segment(2, 0)]})) is None
