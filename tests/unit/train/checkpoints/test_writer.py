"""Writing checkpoints: complete or not at all, by one rank and by several."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from crossbow_py.train.checkpoints.checkpoint import checkpoints, find_newest
from crossbow_py.train.checkpoints.writer import CheckpointWriter, save
from tests.unit.train.checkpoints.marked_checkpoints import (
    discard_together,
    mark_of,
    newest_mark,
    state,
    write_together,
    writers,
)


def names(run_folder: Path) -> list[str]:
    folder = run_folder / "checkpoints"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_save_and_load_return_the_same_tensors_and_plain_values(tmp_path):
    written = {**state(), "half": torch.randn(3).bfloat16(), "count": torch.tensor(3)}
    folder = save(tmp_path, written, samples_seen=320, keep=2)
    assert folder == tmp_path / "checkpoints" / "samples-000000000320"
    read = find_newest(folder)[0].part(0)
    assert torch.equal(read["half"], written["half"])
    assert (read["half"].dtype, read["count"].dtype) == (torch.bfloat16, torch.int64)
    assert mark_of(read) == 1.0
    assert (read["state"], read["choices"]) == (written["state"], written["choices"])


def test_manifest_holds_the_format_the_samples_the_ranks_and_the_hash_of_every_file(tmp_path):
    with writers(tmp_path, num_ranks=2) as ranks:
        write_together(ranks, 320)
        folder = ranks[0].newest
    assert folder == tmp_path / "checkpoints" / "samples-000000000320"
    assert json.loads((folder / "manifest.json").read_text()) == {
        "format_version": 2,
        "samples_seen": 320,
        "num_ranks": 2,
        "sha256": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("rank-0.pt", "rank-1.pt")
        },
    }
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-0.pt", "rank-1.pt"]


def test_hash_of_a_part_of_many_pieces_is_that_of_its_file(tmp_path):
    big = {"a": torch.randn(700_001), "b": torch.randn(5), "c": torch.randn(1_300_003)}  # 2.8 MB and 5.2 MB
    read = find_newest(save(tmp_path, big, 320, keep=1))[0].part(0)
    assert all(torch.equal(read[name], value) for name, value in big.items())


@pytest.mark.parametrize(("keep", "left"), [(1, [400]), (2, [400, 300]), (9, [400, 300, 200, 100])])
def test_save_keeps_the_last_k(tmp_path, keep, left):
    for samples in (100, 200, 300, 400):
        save(tmp_path, state(), samples, keep)
    assert [int(path.name.split("-")[1]) for path in checkpoints(tmp_path)] == left


@pytest.mark.parametrize("keep", [1, 2])
def test_save_after_going_back_drops_the_checkpoints_of_the_other_future(tmp_path, keep):
    for samples in (100, 200, 300):
        save(tmp_path, state(mark=1.0), samples, keep=3)
    save(tmp_path, state(mark=2.0), 250, keep)  # resumed from 200, or started afresh
    saved, _ = find_newest(tmp_path)
    assert (mark_of(saved.part(0)), saved.folder.name) == (2.0, "samples-000000000250")
    assert len(checkpoints(tmp_path)) == keep


def test_save_at_the_same_samples_replaces(tmp_path):
    for mark in (1.0, 2.0):
        save(tmp_path, state(mark), 100, keep=1)
    assert newest_mark(tmp_path) == 2.0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["samples-000000000100"]


def test_status_goes_from_idle_over_written_to_idle_and_the_checkpoint_is_there_only_then(tmp_path):
    with writers(tmp_path, num_ranks=1) as (writer,):
        assert (writer.status, writer.newest, writer.error) == ("idle", None, None)
        writer.begin(state(), 100)
        assert writer.status in ("writing", "written")
        writer.wait()
        assert (writer.status, checkpoints(tmp_path), writer.newest) == ("written", [], None)
        writer.conclude()
        writer.wait()
        assert (writer.status, checkpoints(tmp_path)) == ("idle", [writer.newest])


def test_begin_returns_while_the_part_is_being_written(tmp_path):
    """A pipe takes the place of the file, so that the write ends only when the pipe is read."""
    with writers(tmp_path, num_ranks=1) as (writer,):
        folder = tmp_path / "checkpoints" / ".samples-000000000100.start-1.partial"
        with_pipe = CheckpointWriter(tmp_path, 1, rank=1, num_ranks=2, token="start")
        folder.mkdir(parents=True)
        os.mkfifo(folder / "rank-1.partial")
        with_pipe.begin(state(size=100_000), 100)
        time.sleep(0.05)
        assert with_pipe.status == "writing"
        with open(folder / "rank-1.partial", "rb") as file:
            content = file.read()
        with_pipe.wait()
        assert (with_pipe.status, with_pipe.error.errno) == ("failed", errno.EINVAL)  # a pipe has nothing to fsync
        assert len(content) > 400_000
        with_pipe.close()
        assert writer.status == "idle"


@pytest.mark.slow
@pytest.mark.parametrize("status", ["written", "failed"])
def test_state_is_let_go_once_it_is_written_or_has_failed(tmp_path, status):
    if status == "failed":
        (tmp_path / "checkpoints").write_text("in the way")
    with writers(tmp_path, num_ranks=1) as (writer,):
        tensor = torch.zeros(10)
        gone = weakref.ref(tensor)
        writer.begin({"tensor": tensor}, 100)
        del tensor
        writer.wait()
        gc.collect()
        assert (writer.status, gone()) == (status, None)
        assert isinstance(writer.error, OSError) is (status == "failed")


def test_state_that_torch_cannot_save_is_an_os_error_and_the_thread_goes_on(tmp_path):
    with writers(tmp_path, num_ranks=1) as (writer,):
        writer.begin({"function": lambda: None}, 100)
        writer.wait()
        assert writer.status == "failed"
        assert isinstance(writer.error, OSError) and "local object" in str(writer.error)  # in the words of this Python
        writer.discard()
        writer.wait()
        assert names(tmp_path) == []
        write_together([writer], 200)


def test_close_ends_the_thread_and_leaves_an_unconcluded_part_hidden(tmp_path):
    before = set(threading.enumerate())
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin(state(), 100)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon  # it does not keep a process that is to end
    writer.wait()
    writer.close()
    writer.close()
    assert not thread.is_alive()
    assert checkpoints(tmp_path) == []


def test_close_gives_up_a_part_that_is_being_written(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin({"big": torch.zeros(20_000_000)}, 100)
    writer.close()
    assert checkpoints(tmp_path) == []


def test_three_ranks_write_one_checkpoint_a_part_each(tmp_path):
    with writers(tmp_path, num_ranks=3) as ranks:
        write_together(ranks, 100, mark=1.0)
        write_together(ranks, 200, mark=4.0)
        assert [writer.newest is None for writer in ranks] == [False, True, True]
    saved, problems = find_newest(tmp_path)
    assert (saved.samples_seen, saved.num_ranks, problems) == (200, 3, [])
    assert [mark_of(saved.part(rank)) for rank in range(3)] == [4.0, 5.0, 6.0]
    assert len(names(tmp_path)) == 8


def test_three_ranks_of_which_one_fails_discard_and_nothing_is_left_of_it(tmp_path):
    with writers(tmp_path, num_ranks=3) as ranks:
        write_together(ranks, 100)
        before = names(tmp_path)
        (tmp_path / "checkpoints" / ".samples-000000000200.start-2.partial" / "rank-1.partial").mkdir(parents=True)
        for writer in ranks:
            writer.begin(state(), 200)
        for writer in ranks:
            writer.wait()
        assert [writer.status for writer in ranks] == ["written", "failed", "written"]
        assert ranks[1].error.errno == errno.EISDIR
        discard_together(ranks)
        assert names(tmp_path) == before
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1
        write_together(ranks, 200, mark=7.0)  # the same samples again, as at the end of a run
    assert newest_mark(tmp_path) == 7.0


def test_conclusion_without_a_part_of_another_rank_fails_and_leaves_what_was_there(tmp_path):
    with writers(tmp_path, num_ranks=2) as ranks:
        write_together(ranks, 100)
        before = names(tmp_path)
        ranks[0].begin(state(), 200)
        ranks[0].wait()
        ranks[0].conclude()
        ranks[0].wait()
        assert (ranks[0].status, ranks[0].error.errno) == ("failed", errno.ENOENT)
        discard_together(ranks)
        assert names(tmp_path) == before


def test_discard_of_a_part_that_is_being_written_gives_it_up(tmp_path):
    with writers(tmp_path, num_ranks=2) as ranks:
        for writer in ranks:
            writer.begin({"big": torch.zeros(10_000_000)}, 100)
        discard_together(ranks)
        assert list((tmp_path / "checkpoints").iterdir()) == []
        write_together(ranks, 100)


def test_discard_and_close_before_anything_was_begun_do_nothing(tmp_path):
    with writers(tmp_path, num_ranks=2) as ranks:
        discard_together(ranks)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_another_start_are_dropped_and_never_mixed_in(tmp_path):
    with writers(tmp_path, num_ranks=2, token="killed") as ranks:
        for writer in ranks:
            writer.begin(state(mark=9.0), 100)
        for writer in ranks:
            writer.wait()
    assert len(names(tmp_path)) == 4
    with writers(tmp_path, num_ranks=2, token="next") as ranks:
        ranks[0].begin(state(), 100)
        ranks[0].wait()
        assert not any("killed" in name for name in names(tmp_path))
        ranks[0].conclude()
        ranks[0].wait()
        assert ranks[0].status == "failed"  # the killed start's part of the other rank is not taken
        discard_together(ranks)
