"""When a worker process counts as ended: by the clock, and on its own host by its process."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from crossbow_py.search.study.leases import Lease


@pytest.mark.parametrize(("now", "is_over"), [(100.0, False), (110.0, False), (110.9, False), (111.0, True)])
def test_lease_of_a_living_process_ends_for_others_a_tenth_later(now: float, is_over: bool) -> None:
    lease = Lease.taken(100.0, 10.0)
    assert lease.until == 110.0 and lease.is_over_for_others(now) is is_over


def test_lease_kept_as_plain_values_is_the_same() -> None:
    lease = Lease.taken(100.0, 10.0)
    assert Lease.from_plain(json.loads(json.dumps(lease.to_plain()))) == lease


def test_lease_of_a_killed_process_ends_at_once_also_before_it_is_waited_for() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, json.dumps(Lease.taken(100.0, 10.0).to_plain()).encode())
        signal.pause()
    lease = Lease.from_plain(json.loads(os.read(read, 1000)))
    try:
        assert lease.process == child and not lease.is_over_for_others(100.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        unwaited = lease.is_over_for_others(100.0)
        os.waitpid(child, 0)
        os.close(read), os.close(write)
    assert unwaited and lease.is_over_for_others(100.0)


def test_lease_of_a_process_whose_number_another_has_now_is_over() -> None:
    lease = Lease.taken(100.0, 10.0)
    assert replace(lease, started="1").is_over_for_others(100.0)


@pytest.mark.parametrize("host", ["another host", ""])
def test_lease_of_another_host_ends_by_the_clock_only(host: str) -> None:
    lease = replace(Lease.taken(100.0, 10.0), host=host, process=2**22 + 1)
    assert not lease.is_over_for_others(110.9) and lease.is_over_for_others(111.0)
