"""The thesis' rule and the tuning of workers, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from crossbow_py.core.host import Host
from crossbow_py.engine.sizing.workers import Loading, WorkerState, WorkerTuning, recommend

MB = 10**6
AMPLE = Host(cores=16, memory_bytes=1000 * MB, shared_bytes=None)


def test_recommendation_for_resident_data_has_no_workers() -> None:
    found = recommend(300, Loading(100, resident=True), AMPLE)
    assert (found.batch_size, found.num_workers, found.limits) == (300, 0, ("device memory",))


def test_recommendation_takes_the_workers_that_keep_up_with_the_device() -> None:
    # A worker loads 100 images/s, the device trains 450: five are needed.
    found = recommend(64, Loading(100, fetch_s=0.01, step_s=1 / 450), AMPLE)
    assert (found.batch_size, found.num_workers, found.limits) == (64, 5, ("device memory",))


def test_recommendation_where_workers_keep_up_exactly_takes_no_more() -> None:
    assert recommend(64, Loading(100, fetch_s=0.03, step_s=0.01), AMPLE).num_workers == 3


def test_recommendation_with_too_few_cores_says_so() -> None:
    found = recommend(64, Loading(100, fetch_s=0.1, step_s=0.001), AMPLE)
    assert (found.num_workers, found.limits) == (16, ("device memory", "cores"))
    assert "100 workers would keep up" in found.sentences[1]


def test_recommendation_without_times_takes_the_cores() -> None:
    found = recommend(64, Loading(100), AMPLE)
    assert (found.batch_size, found.num_workers) == (64, 16)
    assert found.sentences[1] == "One worker a usable core (16): how fast loading and training are was not measured."
    assert "how fast a worker loads was not" in recommend(64, Loading(100, step_s=0.1), AMPLE).sentences[1]
    assert "how fast training is was not" in recommend(64, Loading(100, fetch_s=0.1), AMPLE).sentences[1]


def test_recommendation_makes_batches_smaller_where_memory_does_not_hold_the_workers_that_are_needed() -> None:
    # Half of 12 MB for samples of 1 kB: 6000 of them, with 3 batches a worker 2000, for five workers 400 each.
    host = Host(16, 12 * MB, None)
    found = recommend(1000, Loading(1000, fetch_s=0.01, step_s=1 / 450), host)
    assert (found.batch_size, found.num_workers, found.limits) == (400, 5, ("device memory", "host memory"))


def test_recommendation_without_times_gives_up_workers_before_samples() -> None:
    host = Host(16, 12 * MB, None)
    found = recommend(900, Loading(1000), host)
    assert (found.batch_size, found.num_workers, found.limits) == (900, 2, ("device memory", "host memory"))
    assert recommend(5000, Loading(1000), host).batch_size == 2000


def test_recommendation_with_little_shared_memory_names_it() -> None:
    host = Host(16, 1000 * MB, 10 * MB)  # 0.9 of it: 9000 samples of 1 kB, 3000 with 3 batches a worker
    found = recommend(1000, Loading(1000), host)
    assert (found.batch_size, found.num_workers, found.limits) == (1000, 3, ("device memory", "shared memory"))


def test_recommendation_for_samples_that_do_not_go_through_shared_memory_is_not_limited_by_it() -> None:
    host = Host(16, 1000 * MB, 10 * MB)
    found = recommend(1000, Loading(1000, through_shared=False), host)
    assert (found.batch_size, found.num_workers, found.limits) == (1000, 16, ("device memory",))


def test_recommendation_is_no_larger_than_the_data_set() -> None:
    found = recommend(5000, Loading(1, resident=True), AMPLE, most=1797)
    assert (found.batch_size, found.limits) == (1797, ("samples",))


TUNING = WorkerTuning(limit=8)


@pytest.mark.parametrize(
    ("fetch_s", "step_s", "workers"),
    [(0.1, 1.0, 1), (1.0, 1.0, 2), (0.8, 1.0, 1), (3.0, 1.0, 4), (9.0, 1.0, 8), (0, 0, 1)],
)
def test_needed_workers_keep_up_with_a_quarter_to_spare(fetch_s: float, step_s: float, workers: int) -> None:
    assert TUNING.needed(fetch_s, step_s) == workers


def test_waiting_run_gets_at_once_what_it_needs() -> None:
    state, workers = TUNING.observe(WorkerState(1), 0.5, fetch_s_per_batch=3.0, step_s_per_batch=1.0)
    assert workers == 4 == state.num_workers
    assert state.reason == "4 workers instead of 1: waiting for data takes 50.0% of the time."


def test_waiting_run_that_has_what_it_should_need_gets_one_more() -> None:
    assert TUNING.observe(WorkerState(4), 0.04, 1.0, 1.0)[1] == 5


def test_first_window_after_a_change_is_not_looked_at() -> None:
    state, _ = TUNING.observe(WorkerState(1), 0.5, 3.0, 1.0)
    state, workers = TUNING.observe(state, 0.9, 3.0, 1.0)
    assert workers is None and state.reason == ""
    assert TUNING.observe(state, 0.9, 3.0, 1.0)[1] == 5


def test_waiting_run_at_the_limit_stays_and_says_so() -> None:
    state, workers = TUNING.observe(WorkerState(8), 0.4, 20.0, 1.0)
    assert workers is None
    assert state.reason == "Waiting for data takes 40.0% of the time, and 8 workers are as many as there may be."


def test_run_that_hardly_waits_stays() -> None:
    assert TUNING.observe(WorkerState(3), 0.03, 2.0, 1.0) == (WorkerState(3), None)


def test_too_many_workers_are_given_up_after_several_windows() -> None:
    state, said = WorkerState(8), []
    for _ in range(3):
        state, workers = TUNING.observe(state, 0.0, 1.0, 1.0)
        said.append(workers)
    assert said == [None, None, 2]
    assert state.reason == "2 of 8 workers are enough: waiting takes 0.0% of the time."


def test_window_with_use_for_all_workers_begins_the_count_anew() -> None:
    state = WorkerState(8)
    for fetch_s in (1.0, 1.0, 4.0, 1.0, 1.0):
        state, workers = TUNING.observe(state, 0.0, fetch_s, 1.0)
        assert workers is None


def test_tuning_does_not_go_back_and_forth() -> None:
    """One worker waits and two are twice as many as the times say: it settles on two."""
    state, changes = WorkerState(1), []
    for _ in range(50):
        state, workers = TUNING.observe(state, 0.1 if state.num_workers == 1 else 0.0, 0.1, 1.0)
        changes += [workers] if workers else []
    assert changes == [2]
