"""The thesis' rule and the tuning of workers, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from crossbow_py.core.host import Host
from crossbow_py.engine.sizing.workers import Limit, Loading, WorkerState, WorkerTuning, recommend

MB = 10**6
AMPLE = Host(cores=16, memory_bytes=1000 * MB, shared_bytes=None)


SCARCE = Host(16, 12 * MB, None)  # half of it for samples of 1 kB: 6000, and with 3 batches a worker 2000
SHARED = Host(16, 1000 * MB, 10 * MB)  # 0.9 of it: 9000 samples of 1 kB, 3000 with 3 batches a worker
DEVICE: Limit = "device memory"


@pytest.mark.parametrize(
    ("largest", "loading", "host", "most", "batch_size", "num_workers", "limits"),
    [
        (300, Loading(100, resident=True), AMPLE, None, 300, 0, (DEVICE,)),
        # A worker loads 100 images/s, the device trains 450: five are needed.
        (64, Loading(100, fetch_s=0.01, step_s=1 / 450), AMPLE, None, 64, 5, (DEVICE,)),
        (64, Loading(100, fetch_s=0.03, step_s=0.01), AMPLE, None, 64, 3, (DEVICE,)),
        (64, Loading(100, fetch_s=0.1, step_s=0.001), AMPLE, None, 64, 16, (DEVICE, "cores")),
        (64, Loading(100), AMPLE, None, 64, 16, (DEVICE,)),
        # Five workers are needed: 400 samples each.
        (1000, Loading(1000, fetch_s=0.01, step_s=1 / 450), SCARCE, None, 400, 5, (DEVICE, "host memory")),
        (900, Loading(1000), SCARCE, None, 900, 2, (DEVICE, "host memory")),
        (5000, Loading(1000), SCARCE, None, 2000, 1, (DEVICE, "host memory")),
        (1000, Loading(1000), SHARED, None, 1000, 3, (DEVICE, "shared memory")),
        (1000, Loading(1000, through_shared=False), SHARED, None, 1000, 16, (DEVICE,)),
        (5000, Loading(1, resident=True), AMPLE, 1797, 1797, 0, ("samples",)),
    ],
    ids=[
        "resident", "workers that keep up", "exactly", "too few cores", "without times", "smaller batches",
        "workers before samples", "one worker", "shared memory", "not through shared memory", "data set",
    ],
)  # fmt: skip
def test_recommendation_worked_out_by_hand(
    largest: int, loading: Loading, host: Host, most: int | None, batch_size: int, num_workers: int,
    limits: tuple[Limit, ...],
) -> None:  # fmt: skip
    found = recommend(largest, loading, host, most)
    assert (found.batch_size, found.num_workers, found.limits) == (batch_size, num_workers, limits)


@pytest.mark.parametrize(
    ("loading", "sentence"),
    [
        (Loading(100), "One worker a usable core (16): how fast loading and training are was not measured."),
        (Loading(100, step_s=0.1), "One worker a usable core (16): how fast a worker loads was not measured."),
        (Loading(100, fetch_s=0.1), "One worker a usable core (16): how fast training is was not measured."),
        (
            Loading(100, fetch_s=0.1, step_s=0.001),
            "100 workers would keep up with the device, and there are 16 usable cores.",
        ),
    ],
)
def test_recommendation_says_what_the_workers_go_by(loading: Loading, sentence: str) -> None:
    assert recommend(64, loading, AMPLE).sentences[1] == sentence


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
