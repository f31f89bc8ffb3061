"""What ranks leave behind when one hangs: stacks in files, the function of a thread, and half a sentence."""

from __future__ import annotations

import os
import threading
import time

import pytest

from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.distributed import hang
from crossbow_py.distributed.hang import described, innermost, within, write_nccl_trace, write_stacks


@pytest.fixture
def blocked():
    """A thread that waits in a function of this file, for ever."""
    leave = threading.Event()

    def block_for_ever():
        leave.wait()

    thread = threading.Thread(target=block_for_ever, name="a learner")
    thread.start()
    deadline = time.monotonic() + 20
    while "block_for_ever" not in (innermost([thread.ident]) or "") and time.monotonic() < deadline:
        time.sleep(0.005)
    yield thread
    leave.set()
    thread.join()


def test_function_of_a_thread_is_the_innermost_one_and_the_users_that_called_it(blocked):
    found = innermost([blocked.ident])
    function, _, users = found.partition(", called by ")
    assert function.startswith(("Event.wait, ", "Condition.wait, "))
    assert "threading.py:" in function
    assert users.startswith("blocked.<locals>.block_for_ever, ")
    assert users.rpartition(":")[0].endswith("test_hang.py")


def test_stacks_have_the_lines_the_names_of_threads_and_where_each_is(blocked, tmp_path):
    write_stacks(tmp_path / "stacks", ["rank 1 of 2", "task: round 5"])
    text = (tmp_path / "stacks").read_text()
    assert text.startswith("rank 1 of 2\ntask: round 5\n\n")
    assert f"Thread 0x{blocked.ident:016x} is a learner\n" in text
    stack = text.partition(f"Thread 0x{blocked.ident:016x} (most recent call first):\n")[2].partition("\n\n")[0]
    assert "in block_for_ever" in stack
    assert "in test_stacks_have_the_lines_the_names_of_threads_and_where_each_is" in text


def test_stacks_are_not_written_through_a_link_or_into_a_pipe(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            write_stacks(tmp_path / name, [])
    assert (tmp_path / "other").read_text() == "kept"


def test_nccl_trace_is_what_torch_records_and_none_where_torch_has_no_nccl(tmp_path, monkeypatch):
    monkeypatch.delattr(hang._distributed_c10d, "_dump_nccl_trace", raising=False)
    write_nccl_trace(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(hang._distributed_c10d, "_dump_nccl_trace", lambda: b"a pickle", raising=False)
    write_nccl_trace(tmp_path, 3)
    assert (tmp_path / "hang_nccl_rank_3").read_bytes() == b"a pickle"


def test_call_that_blocks_or_fails_is_left_within_the_time():
    leave, begun = threading.Event(), time.monotonic()
    assert not within(0.05, leave.wait)
    assert time.monotonic() - begun < 10
    leave.set()

    def fail():
        raise OSError("disk full")

    assert not within(10, fail)
    assert within(10, lambda: None)


def rank(number, host="a", **changes):
    values = {"pid": 7, "doing": "round 5", "since": "12:00:00", "heard_s": 61.0, **changes}
    return HangingRank(number, host, **values)


def test_rank_is_described_with_its_place_task_function_and_stacks():
    found = described([rank(3, function="forward, m.py:3", stacks="hang_rank3.txt")], ())
    assert found == (
        "rank 3 (a, process 7), which appears to hang in forward, m.py:3: its last task was round 5, since 12:00:00, "
        "last heard of 61 s ago (hang_rank3.txt has its stacks)"
    )


def test_host_of_which_no_rank_answers_is_described_once_and_first():
    found = described([rank(0), rank(4, "b", heard_s=60.0), rank(5, "b")], {"b"})
    first, second = found.split("; ")
    assert first == "every rank of b (4, 5), last heard of 60 s ago: the host is gone, or the network to it"
    assert second.startswith("rank 0 (a, process 7), which appears to hang: ")


def test_many_ranks_are_counted_after_the_first_four():
    found = described([rank(number) for number in range(64)], ())
    assert found.count("which appears to hang") == 4
    assert found.endswith("; and 60 more ranks")
