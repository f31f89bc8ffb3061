"""Searches that are killed at any moment, stopped by signals, and shared by several worker processes."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.search_processes import ended, search_in, started
from tests.searches import events, report, segments, values
from tests.training_processes import await_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_SEGMENTS = 9 + 3 + 1
Outcome = tuple[dict[int, dict[str, float]], dict[str, Any]]


def outcome(folder: Path) -> Outcome:
    """Every value measured, and the best trial: what does not depend on when it was done, and by whom."""
    found = report(folder)
    assert found["status"] == "finished"
    best = {key: found["best"][key] for key in ("trial", "value", "params", "seed", "test_accuracy")}
    return values(folder), best


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed") / "search"
    assert search_in(folder) == 0
    assert len(segments(folder)) == NUM_SEGMENTS
    return outcome(folder)


def has_finished(folder: Path, number: int) -> bool:
    return (folder / "search.journal").exists() and len(segments(folder)) >= number


def assert_no_finished_segment_was_claimed_again(folder: Path) -> None:
    finished: set[tuple[int, int]] = set()
    for event, segment, _ in events(folder):
        assert segment not in finished, f"{segment} was {event} again"
        if event == "finished":
            finished.add(segment)
    assert len(finished) == NUM_SEGMENTS


def assert_as_undisturbed(folder: Path, undisturbed: Outcome) -> None:
    assert_no_finished_segment_was_claimed_again(folder)
    assert outcome(folder) == undisturbed


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_search_killed_at_random_moments_goes_on_and_ends_as_if_undisturbed(
    seed: int, undisturbed: Outcome, tmp_path: Path
) -> None:
    moments = random.Random(seed)
    folder, kills = tmp_path / "search", 0
    while kills < 6:
        begun = len(segments(folder)) if (folder / "search.journal").exists() else 0
        goal = partial(has_finished, folder, begun + moments.choice((0, 0, 1, 2)))
        with started(folder) as process:
            await_true(goal, process)
            time.sleep(moments.uniform(0.0, 0.4))
            process.kill()
            if ended(process) == 0:  # it was faster
                break
            kills += 1
    assert kills >= 2
    assert search_in(folder) == 0
    assert_as_undisturbed(folder, undisturbed)


def test_two_workers_with_one_folder_share_the_trials_and_end_alike(undisturbed: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started(folder) as first:
        await_true(lambda: (folder / "search.journal").exists() and events(folder), first)
        with started(folder) as second:
            assert [ended(first), ended(second)] == [0, 0]
    assert_no_finished_segment_was_claimed_again(folder)
    assert Counter(segments(folder)).most_common(1)[0][1] == 1
    assert len({worker for event, _, worker in events(folder) if event == "finished"}) == 2
    assert outcome(folder) == undisturbed


def test_two_workers_started_at_once_share_the_trials(undisturbed: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started(folder) as first, started(folder) as second:
        assert [ended(first), ended(second)] == [0, 0]
    assert_as_undisturbed(folder, undisturbed)


def test_two_workers_with_folders_of_their_own_share_a_database(undisturbed: Outcome, tmp_path: Path) -> None:
    storage = f"storage=sqlite:///{tmp_path}/shared.db"
    with started(tmp_path / "one", storage) as first, started(tmp_path / "two", storage) as second:
        assert [ended(first), ended(second)] == [0, 0]
    study = optuna.load_study(study_name="search_digits/segments", storage=storage.removeprefix("storage="))
    kept = [trial.user_attrs for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert Counter((each["trial"], each["rung"]) for each in kept).most_common(1)[0][1] == 1
    assert len(kept) == NUM_SEGMENTS
    for folder in ("one", "two"):
        assert values(tmp_path / folder) == undisturbed[0]
        assert report(tmp_path / folder)["best"]["value"] == undisturbed[1]["value"]


def test_worker_that_is_killed_beside_another_is_replaced_by_it(undisturbed: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started(folder) as first:
        await_true(lambda: has_finished(folder, 1), first)
        with started(folder) as second:
            await_true(lambda: len({worker for _, _, worker in events(folder)}) == 2, second)
            first.kill()
            assert ended(second) == 0
    assert_as_undisturbed(folder, undisturbed)
