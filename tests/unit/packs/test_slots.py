"""Several packs at once: each at its own pace, all drained afterwards, failures kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossbow_py.packs import slots
from crossbow_py.packs.slots import advance


class Counted:
    """A pack whose segment is over after some rounds."""

    def __init__(self, rounds: int, fails_at: int | None = None) -> None:
        self.left, self.fails_at, self.taken, self.drained = rounds, fails_at, 0, 0
        self.threads: set[int] = set()

    def step(self) -> bool:
        if self.taken == self.fails_at:
            raise ArithmeticError("a round failed")
        self.threads.add(torch.get_num_threads())
        if self.left == 0:
            return False
        self.left, self.taken = self.left - 1, self.taken + 1
        return True

    def is_ready(self) -> bool:
        return True

    def drain(self) -> None:
        self.drained += 1


class Clock:
    """Goes on while somebody waits."""

    now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Device(Counted):
    """A pack whose rounds take a time on a device, one behind the other; `fails` when it is asked how far it is."""

    def __init__(self, clock: Clock, round_s: float, rounds: int = 10**9, fails: bool = False) -> None:
        super().__init__(rounds)
        self.clock, self.round_s, self.over_s, self.fails = clock, round_s, [0.0, 0.0], fails

    def is_ready(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.over_s[-2] <= self.clock.now_s

    def step(self) -> bool:
        self.clock.now_s = max(self.clock.now_s, self.over_s[-2])  # waits for the round before the last
        self.over_s.append(max(self.clock.now_s, self.over_s[-1]) + self.round_s)
        return super().step()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slots, "time", clock)
    return clock


def run(packs: list[Any], device: str, enough: Callable[[], bool] = lambda: False) -> dict[int, Exception]:
    return advance(packs, enough, device=torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packs_train_until_one_is_over_and_all_are_drained(device: str) -> None:
    packs = [Counted(5), Counted(10**9)]
    assert run(packs, device) == {}
    assert packs[0].taken == 5 and [pack.drained for pack in packs] == [1, 1]


def test_packs_on_cuda_whose_rounds_are_over_go_round_by_round() -> None:
    packs = [Counted(5), Counted(10**9)]
    run(packs, "cuda")
    assert packs[1].taken in (5, 6)


def test_slow_pack_on_cuda_holds_up_no_fast_one_and_starves_by_none(clock: Clock) -> None:
    slow, fast = Device(clock, 0.05), Device(clock, 0.001)
    run([slow, fast], "cuda", lambda: clock.now_s >= 1.0)
    assert slow.taken in (21, 22) and fast.taken in (1001, 1002)  # one that runs, and one behind it


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pack_that_fails_ends_its_own_rounds_and_is_named(device: str) -> None:
    packs = [Counted(10**9), Counted(10**9, fails_at=3)]
    failures = run(packs, device)
    assert list(failures) == [1] and str(failures[1]) == "a round failed"
    assert packs[0].drained == 1 and packs[1].drained == 0


def test_enough_stops_a_pack_that_is_alone() -> None:
    pack = Counted(10**9)
    run([pack], "cpu", lambda: pack.taken >= 7)
    assert pack.taken == 7 and pack.drained == 1


def test_packs_on_a_cpu_share_its_cores() -> None:
    before = torch.get_num_threads()
    packs = [Counted(5), Counted(5)]
    run(packs, "cpu")
    assert packs[0].threads | packs[1].threads == {max(1, before // 2)} and torch.get_num_threads() == before
