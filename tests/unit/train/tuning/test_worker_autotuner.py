"""The number of workers of a run: the first one, and windows that correct it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossbow_py.core.host import Host
from crossbow_py.data.streaming.streaming_feed import LoadingTimes
from crossbow_py.train.tuning.worker_autotuner import WorkerAutotuner, first_workers

HOST = Host(cores=4, memory_bytes=2**34, shared_bytes=2**30)


def feed(num_workers: int = 1, through_shared: bool = True) -> Any:
    """A stand-in for a streaming feed; the test sets what was loaded."""
    made = SimpleNamespace(
        batch_size=10, num_workers=num_workers, sample_bytes=1000, through_shared=through_shared,
        loading_times=LoadingTimes(0, 0.0), clock=0.0, waited=0.0, batches=0,
    )  # fmt: skip
    made.use_workers = lambda number: setattr(made, "num_workers", number)
    return made


def train(supply: WorkerAutotuner, feed: Any, windows: int, waited: float, fetch_s: float) -> list[str]:
    """Train for windows of 2 s with 10 batches each, waiting for `waited` s; a batch takes `fetch_s` to load."""
    said = []
    for _ in range(windows):
        feed.clock += 2.0
        feed.waited += waited
        feed.batches += 10
        feed.loading_times = LoadingTimes(feed.batches, feed.batches * fetch_s)
        said.append(supply.after_round(feed.clock, feed.waited, feed.batches))
    return [each for each in said if each]


@pytest.fixture
def fed() -> Any:
    return feed()


def begun(fed: Any, host: Host = HOST) -> WorkerAutotuner:
    supply = WorkerAutotuner(fed, host)
    assert supply.after_round(0.0, 0.0, 0) == ""
    return supply


def test_first_workers_takes_what_was_asked_for_and_one_on_a_cpu():
    assert first_workers(5, torch.device("cpu")) == 5 and first_workers(0, torch.device("cuda")) == 0
    assert first_workers("auto", torch.device("cpu")) == 1
    assert 1 <= first_workers("auto", torch.device("cuda")) <= 8


def test_run_that_does_not_wait_keeps_its_workers(fed):
    assert train(begun(fed), fed, windows=10, waited=0.0, fetch_s=0.01) == []
    assert fed.num_workers == 1


def test_run_that_waits_gets_the_workers_its_times_ask_for(fed):
    # 10 batches in 2 s, half of it waiting: a step of 0.1 s against 0.2 s of loading, and a quarter to spare: 2.5.
    said = train(begun(fed), fed, windows=1, waited=1.0, fetch_s=0.2)
    assert fed.num_workers == 3
    assert said == ["3 workers instead of 1: waiting for data takes 50.0% of the time."]


def test_window_after_a_change_is_not_looked_at(fed):
    supply = begun(fed)
    for num_workers in (2, 2, 3):
        train(supply, fed, windows=1, waited=1.0, fetch_s=0.1)
        assert fed.num_workers == num_workers


def test_starved_run_at_the_limit_says_so_once(fed):
    supply = begun(fed)
    said = train(supply, fed, windows=12, waited=1.5, fetch_s=1.0)
    assert fed.num_workers == 4
    assert len(said) == 2 and "4 workers are as many as there may be" in said[1]


def test_part_of_a_window_is_not_looked_at(fed):
    supply = begun(fed)
    fed.loading_times = LoadingTimes(9, 9.0)
    assert supply.after_round(1.9, 1.8, 9) == "" and fed.num_workers == 1


SMALL = Host(cores=16, memory_bytes=2**34, shared_bytes=100_000)


@pytest.mark.parametrize(
    ("host", "through_shared", "limit"),
    [(HOST, True, 4), (SMALL, True, 3), (SMALL, False, 8)],  # 3: 0.9 · 100,000 / (3 · 10 · 1000)
)
def test_limit_follows_from_cores_and_memory_that_samples_go_through(host, through_shared, limit):
    assert begun(feed(num_workers=8, through_shared=through_shared), host).state.num_workers == limit
