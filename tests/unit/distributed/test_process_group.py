"""How ranks find each other: in a store that former starts have left keys in, with one GPU each, and in time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from crossbow_py.core.errors import RankLostError, UserError
from crossbow_py.distributed import process_group
from crossbow_py.distributed.process_group import ProcessGroupRanks, agree_on_start, joined, take_place
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.distributed.settings import DistributedSettings
from tests.ranks import on_ranks

PATIENCE_S = 20.0


def at_once(*calls: Callable[[], str]) -> list[str]:
    """What each returns, in threads of their own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def start(store: HashStore, num_ranks: int) -> list[str]:
    """One start of so many ranks."""
    return at_once(*(lambda rank=rank: agree_on_start(store, rank, num_ranks, PATIENCE_S) for rank in range(num_ranks)))


def test_starts_over_one_store_have_a_name_each_which_is_alike_on_all_ranks():
    store = HashStore()
    starts = [start(store, num_ranks) for num_ranks in (3, 3, 2, 4)]
    assert all(len(set(names)) == 1 for names in starts)
    assert len({names[0] for names in starts}) == 4


def test_first_rank_that_has_answered_a_process_that_ended_answers_the_one_in_its_place():
    store = HashStore()
    store.set("hello/1", "ended")

    def come_later() -> str:
        while not store.check(["answer/ended"]):
            time.sleep(0.001)
        return agree_on_start(store, 1, 2, PATIENCE_S)

    first, second = at_once(lambda: agree_on_start(store, 0, 2, PATIENCE_S), come_later)
    assert first == second == store.get("answer/ended").decode()


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_rank_takes_no_answer_that_was_given_to_another():
    store, clock = HashStore(), Time()
    store.set("hello/1", "ended")
    store.set("answer/ended", "former")
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        agree_on_start(store, 1, 2, 30.0, clock, clock.sleep)
    assert 130.0 <= clock.now < 131.0


def test_first_rank_names_those_that_have_not_come_in_time():
    store, clock = HashStore(), Time()
    store.set("hello/1", "ended")
    coming = threading.Thread(target=agree_on_start, args=(store, 2, 4, PATIENCE_S))
    coming.start()
    while not store.check(["hello/2"]):
        time.sleep(0.001)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        coming.join(PATIENCE_S)

    with pytest.raises(TimeoutError, match=r"^nothing from rank 1, 3$"):
        agree_on_start(store, 0, 4, 30.0, clock, sleep)


def decide_late(ranks: Ranks) -> list[list[float]]:
    """Join again with a count of starts of this rank's own, and decide later than ranks may come."""
    ranks.close()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(ranks.rank)
    process_group._START_S = 2.0
    with joined(DistributedSettings(), "cpu") as again:
        time.sleep(3.0 * again.rank)
        return again.gather([float(again.rank)])


@pytest.mark.slow
def test_ranks_whose_hosts_count_starts_differently_join_and_wait_for_one_that_loads_for_long():
    assert on_ranks(decide_late, 2) == [[[0.0], [1.0]]] * 2


def limit_s(ranks: Ranks) -> float:
    """How long a decision may take by the process group's own limit."""
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.slow
def test_decisions_may_take_as_long_as_the_watch_lets_them():
    assert on_ranks(limit_s, 2, timeout_s=1e7) == [1e7 + 60.0] * 2


def test_rank_alone_under_torchrun_ends_with_it_too(monkeypatch):
    asked = []
    monkeypatch.setattr(process_group, "end_with_launcher", lambda: asked.append("end"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined() as ranks:
        assert asked == ["end"]
        assert ranks.num_ranks == 1


def ranks_of_this_host(**attributes: Any) -> ProcessGroupRanks:
    """Two ranks that have not joined."""
    ranks = object.__new__(ProcessGroupRanks)
    vars(ranks).update({"rank": 1, "num_ranks": 2, "local_rank": 1, "num_local": 2, "_timeout_s": 1.0, **attributes})
    return ranks


@pytest.mark.parametrize(
    ("platform", "num_local", "interface"), [("linux", 2, "lo"), ("linux", 1, None), ("darwin", 2, None)]
)
def test_loopback_is_named_on_linux_to_ranks_that_are_all_on_one_host(monkeypatch, platform, num_local, interface):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", platform)
    ranks_of_this_host(num_local=num_local)._keep_local()
    assert [os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")] == [interface] * 2


def test_group_that_cannot_be_connected_is_a_lost_rank(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.distributed.DistStoreError("wait timeout\nafter 61 s")

    monkeypatch.setattr(torch.distributed, "new_group", refuse)
    ranks = ranks_of_this_host(watch=Ranks().watch)
    said = r"not all of 2 ranks have connected \(DistStoreError: wait timeout after 61 s\)"
    with pytest.raises(RankLostError, match=said):
        ranks.collective(torch.device("cpu"))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that torch is set to, on a host with 16 cores."""
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(process_group, "read_host", lambda: SimpleNamespace(cores=16))
    return found


@pytest.mark.parametrize(("number", "share"), [(1, 16), (3, 5), (8, 2), (20, 1)])
def test_process_takes_its_share_of_the_cores(
    number: int, share: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    take_place(0, number, on_gpu=False)
    assert threads == [share]


def test_process_keeps_the_users_number_of_threads(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    take_place(0, 2, on_gpu=False)
    assert threads == []


@pytest.mark.usefixtures("threads")
def test_hardware_queues_are_asked_for_before_a_process_takes_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((device, os.environ.get(name))))
    take_place(1, 2, on_gpu=True)
    assert seen == [(1, "32")]


@pytest.mark.usefixtures("threads")
def test_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"^there are 3 ranks on this host and 2 GPUs, .* set --nproc-per-node=2, as"):
        take_place(2, 3, on_gpu=True)
