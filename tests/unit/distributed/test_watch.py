"""Who hangs: ranks that share a dict as their store and a clock that tests set."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from datetime import datetime

import pytest

from crossbow_py.distributed import watch as watch_module
from crossbow_py.distributed.watch import RankWatch, Watch
from crossbow_py.engine.tasks import LearningTask


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class DictStore:
    """What torch's store does with keys that are there; it may stop answering."""

    def __init__(self):
        self.values, self.answers = {}, True

    def set(self, key, value):
        self._answer()
        self.values[key] = value.encode()

    def multi_get(self, keys):
        self._answer()
        return [self.values[key] for key in keys]

    def _answer(self):
        if not self.answers:
            raise RuntimeError("connection reset")


class Ranks:
    """`num_ranks` watches that listen and speak when `exchange` is called; timeout 50 s, so silent is 4 s."""

    def __init__(self, num_ranks, doing="starting"):
        self.store, self.clock = DictStore(), Clock()
        self.watches = [RankWatch(self.store, rank, num_ranks, 50.0, clock=self.clock) for rank in range(num_ranks)]
        for watch in self.watches:  # as when they join; in torch's store, whoever asks blocks until all are there
            watch.doing = doing
            watch.report()

    def exchange(self, ranks, seconds=0.0, every_s=1.0):
        """The ranks named exchange, once a second for so long."""
        for _ in range(max(1, int(seconds / every_s))):
            self.clock.now += every_s if seconds else 0.0
            for rank in ranks:
                self.watches[rank].exchange()

    def exchange_until(self, is_done, ranks):
        """The ranks named exchange, at one moment of their clock, until threads of theirs have done something."""
        deadline = time.monotonic() + 20
        while not is_done():
            assert time.monotonic() < deadline
            self.exchange(ranks)
            time.sleep(0.01)

    def said(self, rank):
        return json.loads(self.store.values[f"watch/{rank}"])


def test_watch_of_one_rank_alone_does_nothing():
    watch = Watch()
    watch.start()
    with watch.waiting():
        pass
    watch.close()


def test_find_is_silent_while_a_rank_waits_less_than_the_timeout():
    ranks = Ranks(2)
    with ranks.watches[0].waiting():
        ranks.exchange([0, 1], 49)
        assert ranks.watches[0].find() is None
        ranks.exchange([0, 1], 1)
        assert ranks.watches[0].find() is not None


def test_find_names_the_silent_rank_its_host_process_and_last_task():
    ranks = Ranks(3)
    ranks.watches[1].doing, ranks.watches[1].running = "round 8", {"learner 0": LearningTask(0, 7)}
    ranks.exchange([1, 0, 2])
    with ranks.watches[0].waiting(), ranks.watches[2].waiting():
        ranks.exchange([0, 2], 60)
        found = ranks.watches[0].find()
    assert found is not None
    assert found.startswith("rank 0 has waited for 60 s (distributed.timeout_s=50) for rank 1 (")
    assert f"rank 1 ({socket.gethostname()}, process {os.getpid()}), which appears to hang" in found
    assert re.search(
        r"its last task was learning\(0\) of round 7, since \S+, last heard of 60 s ago\. ", found
    )
    assert "rank 2" not in found
    assert found.endswith("resume=auto.")


@pytest.mark.parametrize(
    ("num_ranks", "waiting", "answering", "said", "unsaid"),
    [
        # One has hung since it joined.
        (2, [0], [0], ["to hang: its last task was the evaluation after round 9, since ", "heard of 60 s ago. "], ";"),
        # The last one works while all others wait.
        (3, [0, 1], [0, 1, 2], ["for rank 2 (", "the evaluation after round 9"], "rank 1"),
        # One is silent, and another works.
        (3, [0], [0, 2], ["for rank 1 ("], "rank 2"),
        (3, [0], [0], ["for rank 1 (", "; rank 2 ("], "network"),
        # All wait for each other.
        (2, [0, 1], [0, 1], ["so have all others: the network between their hosts is lost"], "to hang"),
    ],
)
def test_find_blames_silent_ranks_then_those_that_work_then_the_network(num_ranks, waiting, answering, said, unsaid):
    ranks = Ranks(num_ranks, "the evaluation after round 9")
    ranks.exchange([0])  # hears what the others said when they joined
    with contextlib.ExitStack() as stack:
        for rank in waiting:
            stack.enter_context(ranks.watches[rank].waiting())
        ranks.exchange(answering, 60)
        found = ranks.watches[0].find()
    assert found.startswith("rank 0 has waited for 60 s")
    assert all(each in found for each in said) and unsaid not in found


def test_find_blames_the_way_to_the_store_when_it_does_not_answer():
    ranks = Ranks(2)
    with ranks.watches[0].waiting():
        ranks.exchange([0, 1], 45)
        ranks.store.answers = False
        ranks.clock.now += 10
        found = ranks.watches[0].find()
        assert ranks.watches[0].hanging() == []  # nothing is known of the other
    assert "the launcher's store has not answered for 10 s" in found


def test_find_says_for_how_long_the_task_is_the_same(monkeypatch):
    monkeypatch.setattr(watch_module.time, "time", lambda: 1_700_000_000.0)
    ranks = Ranks(2, "round 1")
    ranks.exchange([0, 1])
    ranks.watches[1].doing = "round 2"
    with ranks.watches[0].waiting():
        ranks.exchange([1, 0], 60)
        (hanging,) = ranks.watches[0].hanging()
    # Heard first after one of the 60 s, by the clock of the rank that waits.
    assert datetime.fromisoformat(hanging.since).timestamp() == 1_700_000_000.0 - 59
    assert (hanging.rank, hanging.doing, hanging.heard_s) == (1, "round 2", 0.0)


def test_find_names_a_host_of_which_no_rank_answers(monkeypatch):
    ranks = Ranks(4)
    for rank in (2, 3):
        monkeypatch.setattr(watch_module.socket, "gethostname", lambda: "elsewhere")
        ranks.watches[rank].report()
    monkeypatch.undo()
    with ranks.watches[0].waiting(), ranks.watches[1].waiting():
        ranks.exchange([0, 1], 60)
        found = ranks.watches[0].find()
    assert "for every rank of elsewhere (2, 3), last heard of 59 s ago: the host is gone, or the network to it" in found


def test_find_says_that_a_device_may_hang_when_all_wait_for_one():
    ranks = Ranks(2)
    with ranks.watches[0].waiting(on_device=True), ranks.watches[1].waiting(on_device=True):
        ranks.exchange([0, 1], 60)
        found = ranks.watches[0].find()
    assert "the network between their hosts is lost, or a device hangs." in found


def test_rank_that_waits_joins_another_that_has_waited_for_too_long():
    ranks = Ranks(3)
    with ranks.watches[0].waiting():
        ranks.exchange([0, 1, 2], 45)
        with ranks.watches[1].waiting():
            ranks.exchange([0, 1, 2], 2)
            ranks.watches[0]._asks = True
            ranks.exchange([0, 1])
            assert ranks.watches[1].find() is None  # what it has heard may be of before the wait
            ranks.exchange([0, 1, 2], 3)
            assert ranks.watches[1].find().startswith("rank 1 has waited for 5 s")


def test_rank_does_not_join_one_that_asks_but_waits_no_more():
    ranks = Ranks(2)
    ranks.watches[0]._asks = True
    with ranks.watches[0].waiting():
        ranks.exchange([0, 1], 50)
    for waits in (contextlib.nullcontext(), ranks.watches[0].waiting()):
        with waits, ranks.watches[1].waiting():
            ranks.exchange([0, 1], 10)
            assert ranks.watches[1].find() is None


def test_stacks_are_written_by_every_rank_that_is_asked_also_the_one_that_hangs(tmp_path):
    ranks = Ranks(3, "round 7")
    for watch in ranks.watches:
        watch.folder = tmp_path
    with ranks.watches[0].waiting():
        ranks.exchange([0, 1, 2], 60)
        assert list(tmp_path.iterdir()) == []
        assert not any(watch.is_ending for watch in ranks.watches)
        ranks.watches[0]._asks = True
        # The third hangs so that its thread does not run either.
        ranks.exchange_until(lambda: ranks.said(0)["answered"] and ranks.said(1)["answered"], [0, 1])
        ranks.exchange([0])
        hanging = {each.rank: each for each in ranks.watches[0].hanging()}
    assert [watch.is_ending for watch in ranks.watches] == [True, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hang_rank0.txt", "hang_rank1.txt"]
    assert hanging[1].stacks == "hang_rank1.txt"
    assert "called by Ranks.exchange" in hanging[1].function  # here the main thread exchanges
    assert (hanging[2].stacks, hanging[2].function) == (None, None)
    text = (tmp_path / "hang_rank0.txt").read_text()
    assert text.startswith(f"rank 0 of 3 on {socket.gethostname()}, process {os.getpid()}, ")
    assert "\ntask: round 7\n" in text and "\nwaits for other ranks: for 60 s\n" in text


def test_ranks_go_on_to_speak_and_listen_while_a_disk_does_not_answer(tmp_path, monkeypatch):
    disk = threading.Event()
    monkeypatch.setattr(watch_module, "write_stacks", lambda path, lines: disk.wait(20))
    ranks = Ranks(3)
    for watch in ranks.watches:
        watch.folder = tmp_path
    with ranks.watches[0].waiting(), ranks.watches[1].waiting():
        ranks.exchange([0, 1, 2], 50)
        ranks.watches[0]._asks = True
        ranks.exchange([0, 1, 2], 6)
        assert not any(ranks.said(rank)["answered"] for rank in range(3))
        assert [each.rank for each in ranks.watches[0].hanging()] == [2]
        disk.set()
        ranks.exchange_until(lambda: all(ranks.said(rank)["answered"] for rank in range(3)), [0, 1, 2])
        assert [ranks.said(rank)["stacks"] for rank in range(3)] == [f"hang_rank{rank}.txt" for rank in range(3)]


def test_waiting_of_several_threads_counts_from_the_one_that_began_first():
    ranks = Ranks(2)
    watch, inside, leave = ranks.watches[0], threading.Event(), threading.Event()

    def wait():
        with watch.waiting():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait()
    ranks.exchange([0, 1], 30)
    with watch.waiting():
        ranks.exchange([0, 1], 20)
        assert watch.find() is not None  # the thread has waited for 50 s
        leave.set()
        thread.join()
        assert watch.find() is None  # this one for 20 s
        ranks.exchange([0, 1], 30)
        assert watch.find() is not None
    assert watch.find() is None


def make_running(store, rank, found, num_ranks=2, timeout_s=0.1):
    watch = RankWatch(store, rank, num_ranks, timeout_s, end=found.append)
    watch.start()
    return watch


def until(is_done):
    deadline = time.monotonic() + 20
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_done()


def watch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("crossbow watch")]


def test_threads_find_the_rank_that_stopped_speaking_tell_it_once_and_end_on_close():
    store, found = DictStore(), []
    other = RankWatch(store, 1, 2, timeout_s=0.1)
    other.report()
    watch = make_running(store, 0, found)
    watch.start()  # a second time does nothing
    assert len(watch_threads()) == 2
    with watch.waiting():
        until(lambda: found)
    watch.close()
    assert len(found) == 1
    assert "rank 1 (" in found[0]
    assert watch_threads() == []


@pytest.mark.slow
def test_ranks_that_wait_record_once_what_the_one_that_hangs_was_doing_and_end_together(tmp_path):
    """Rank 2 does not wait, and its threads answer: as in a model that blocks."""
    store, records, found = DictStore(), [], [[], [], []]
    for rank in range(3):
        RankWatch(store, rank, 3, timeout_s=0.1).report()
    watches = [make_running(store, rank, found[rank], 3, timeout_s=1.0) for rank in range(3)]
    for rank, watch in enumerate(watches):
        watch.folder, watch.doing = tmp_path, "round 5"
        watch.record = lambda hanging, sentence, rank=rank: records.append((rank, hanging, sentence))
    with watches[0].waiting(), watches[1].waiting():
        until(lambda: found[0] and found[1])
    for watch in watches:
        watch.close()
    ((rank, (hanging,), sentence),) = records
    assert (rank, hanging.rank, hanging.doing, hanging.stacks) == (0, 2, "round 5", "hang_rank2.txt")
    assert "test_watch.py" in hanging.function  # the main thread of this process
    assert f"which appears to hang in {hanging.function}" in sentence
    assert found == [[sentence], [found[1][0]], []]
    assert "for rank 2 (" in found[1][0]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def question(tmp_path, monkeypatch):
    """Two ranks of which the first has waited for too long, and asks; their disk answers once `disk` is set."""
    asked, disk = threading.Event(), threading.Event()

    def write(path, lines):
        asked.set()
        disk.wait(20)

    monkeypatch.setattr(watch_module, "write_stacks", write)
    store, events = DictStore(), []
    for rank in range(2):
        RankWatch(store, rank, 2, timeout_s=1.0).report()
    watches = [RankWatch(store, rank, 2, 1.0, end=lambda _: events.append("end")) for rank in range(2)]
    for watch in watches:
        watch.folder, watch.record = tmp_path, lambda hanging, sentence: events.append("record")
        watch.start()
    yield watches, asked, disk, events
    disk.set()
    for watch in watches:
        watch.close()


@pytest.mark.slow
def test_rank_that_was_only_late_ends_no_run(question):
    (first, late), asked, disk, events = question
    with first.waiting():
        assert asked.wait(20)
    disk.set()
    until(lambda: not first.is_ending and not late.is_ending)
    assert events == []
    with first.waiting():  # for the next one it asks again
        until(lambda: events == ["record", "end"])


@pytest.mark.slow
def test_watch_that_is_closed_while_it_asks_records_and_ends_nothing(question):
    (first, _), asked, disk, events = question
    with first.waiting():
        assert asked.wait(20)
        first.close()
        disk.set()
        until(lambda: not first.is_ending or events)
    assert events == []


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True])
def test_no_wait_ends_and_no_watch_closes_between_the_record_and_the_end(question, closes):
    (first, _), _, disk, events = question
    recording = threading.Event()

    def record(hanging, sentence):
        events.append("record")
        recording.set()
        time.sleep(0.2)

    first.record = record
    disk.set()
    with first.waiting():
        assert recording.wait(20)
        if closes:
            first.close()
            events.append("closed")
    events.append("left")
    assert events == ["record", "end", *["closed"] * closes, "left"]


@pytest.mark.slow
def test_wait_that_fails_while_the_rank_asks_is_recorded_as_a_hang(question):
    (first, _), asked, disk, events = question
    with pytest.raises(RuntimeError, match="lost"), first.waiting():
        assert asked.wait(20)
        disk.set()
        raise RuntimeError("lost")
    assert events == ["record", "end"]


def test_record_that_fails_and_a_folder_that_is_gone_keep_no_rank_from_ending(tmp_path):
    store, found = DictStore(), []
    RankWatch(store, 1, 2, timeout_s=0.1).report()
    watch = make_running(store, 0, found)
    watch.folder = tmp_path / "gone"

    def fail(hanging, sentence):
        raise OSError("disk full")

    watch.record = fail
    with watch.waiting():
        until(lambda: found)
    watch.close()
    assert "for rank 1 (" in found[0]


def test_threads_of_ranks_that_answer_each_other_find_nothing_and_end_on_close():
    store, found = DictStore(), []
    for rank in range(2):
        RankWatch(store, rank, 2, timeout_s=0.1).report()
    watches = [make_running(store, rank, found) for rank in range(2)]
    time.sleep(0.3)
    for watch in watches:
        watch.close()
    assert found == []
    assert watch_threads() == []
    beats = [json.loads(store.values[f"watch/{rank}"])["beat"] for rank in range(2)]
    assert min(beats) >= 2


def test_thread_that_speaks_survives_nothing_but_is_silent_when_the_store_is_lost(tmp_path):
    store, found = DictStore(), []
    store.answers = False
    watch = make_running(store, 0, found)
    watch.folder = tmp_path
    with watch.waiting():
        until(lambda: found)
    watch.close()
    assert "store has not answered" in found[0]
    assert (tmp_path / "hang_rank0.txt").exists()
