"""The number of threads that torch splits an operator over, chosen and given back, and how they wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossbow_py.core.host import usable_core_ids
from crossbow_py.engine.device import host
from crossbow_py.engine.device.host import SleepingThreads, faster_threads, intra_op_threads

# Seconds of CPU time after operators on two threads, while the process does nothing: spinning, sleeping, spinning.
IDLE_SECONDS = """
import json, time, torch
from crossbow_py.engine.device.host import SleepingThreads
from crossbow_py.core.host import usable_core_ids

torch.set_num_threads(2)
sleep, found = SleepingThreads(len(usable_core_ids())), []
for switch in (sleep.stop, sleep.start, sleep.stop):
    switch()
    used_s = 0.0
    for _ in range(30):
        torch.zeros(2**18, dtype=torch.int8)
        begun_s = time.process_time()
        time.sleep(0.005)
        used_s += time.process_time() - begun_s
    found.append(used_s)
print(json.dumps(found))
"""
SPINS = (
    len(usable_core_ids()) > 1
    and "libgomp" in Path("/proc/self/maps").read_text()
    and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)  # that of all tests


@pytest.mark.parametrize(("alone_s", "together_s", "best"), [(1.0, 2.0, 1), (2.0, 1.0, 2)])
def test_threads_are_as_many_as_took_less_time(
    monkeypatch: pytest.MonkeyPatch, alone_s: float, together_s: float, best: int
) -> None:
    now_s = [0.0]

    def work() -> None:
        now_s[0] += alone_s if torch.get_num_threads() == 1 else together_s

    monkeypatch.setattr(host.time, "perf_counter", lambda: now_s[0])
    assert faster_threads(work) == best
    assert torch.get_num_threads() == 2


def test_threads_are_given_back_by_work_that_fails() -> None:
    def fail() -> None:
        if torch.get_num_threads() == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        faster_threads(fail)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), intra_op_threads(1):
        fail()
    assert torch.get_num_threads() == 2


@pytest.mark.slow
@pytest.mark.skipif(not SPINS, reason="threads wait as libgomp does by default, where there are two cores")
def test_threads_take_no_time_while_they_wait_asleep_and_do_again_afterwards() -> None:
    # In a process of its own: threads of other tests may be more than there are cores.
    done = subprocess.run([sys.executable, "-c", IDLE_SECONDS], capture_output=True, text=True, check=True)
    before, asleep, after = json.loads(done.stdout)
    if min(before, after) < 0.02:  # of 0.15 s in which it might
        pytest.skip("other programs hold the cores, so that nothing spins here")
    assert asleep < 0.25 * before and asleep < 0.25 * after, done.stdout


def test_sleeping_threads_started_and_stopped_twice_leave_torch_as_it_was() -> None:
    sleep = SleepingThreads(4)
    for _ in range(2):
        sleep.start()
        sleep.start()
        assert torch.get_num_threads() == 2
        sleep.stop()
        sleep.stop()
    assert torch.get_num_threads() == 2
