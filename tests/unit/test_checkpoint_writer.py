"""Writing checkpoints: whole or not there, whatever is killed, full, read-only or deleted; one rank and several."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from crossbow_py.checkpoint import checkpoints, find_newest, open_checkpoint
from crossbow_py.checkpoint_writer import CheckpointWriter, save

MOST_STEPS = 200
ENOUGH = 8192  # a page for the part and one for its hash, or for the manifest


def state(mark: float = 1.0, size: int = 6):
    return {
        "choices": {"executor": "serial"},
        "bank": {"weights": {"0.weight": torch.full((size,), mark)}, "step_counts": [1, 2]},
        "state": {"samples_seen": 8, "best_accuracy": None},
    }


def mark_of(saved) -> float:
    return saved["bank"]["weights"]["0.weight"][0].item()


def newest_mark(run_folder: Path) -> float:
    return mark_of(find_newest(run_folder)[0].part(0))


def names(run_folder: Path) -> list[str]:
    folder = run_folder / "checkpoints"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def writers(run_folder: Path, num_ranks: int, keep: int = 2, token: str = "start") -> Iterator[list[CheckpointWriter]]:
    made = [CheckpointWriter(run_folder, keep, rank, num_ranks, token) for rank in range(num_ranks)]
    try:
        yield made
    finally:
        for writer in made:
            writer.close()


def write_together(ranks: list[CheckpointWriter], samples: int, mark: float = 1.0) -> None:
    for rank, writer in enumerate(ranks):
        writer.begin(state(mark + rank), samples)
    for writer in ranks:
        writer.wait()
    assert [writer.status for writer in ranks] == ["written"] * len(ranks)
    for writer in ranks:
        writer.conclude()
    ranks[0].wait()
    assert [writer.status for writer in ranks] == ["idle"] * len(ranks)


def discard_together(ranks: list[CheckpointWriter]) -> None:
    for writer in ranks:
        writer.discard()
    for writer in ranks:
        writer.wait()
        assert (writer.status, writer.error) == ("idle", None)


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
    """A pipe in the place of the file, so that the write ends when it is read, and not before."""
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


def test_state_is_let_go_once_it_is_written(tmp_path):
    with writers(tmp_path, num_ranks=1) as (writer,):
        tensor = torch.zeros(10)
        gone = weakref.ref(tensor)
        writer.begin({"tensor": tensor}, 100)
        del tensor
        writer.wait()
        assert gone() is None


def test_state_is_let_go_once_it_has_failed(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with writers(tmp_path, num_ranks=1) as (writer,):
        tensor = torch.zeros(10)
        gone = weakref.ref(tensor)
        writer.begin({"tensor": tensor}, 100)
        del tensor
        writer.wait()
        gc.collect()
        assert (writer.status, gone()) == ("failed", None)
        assert isinstance(writer.error, OSError)


def test_state_that_torch_cannot_save_is_an_os_error_and_the_thread_goes_on(tmp_path):
    with writers(tmp_path, num_ranks=1) as (writer,):
        writer.begin({"function": lambda: None}, 100)
        writer.wait()
        assert writer.status == "failed"
        assert "pickle" in str(writer.error)
        writer.discard()
        writer.wait()
        assert names(tmp_path) == []
        write_together([writer], 200)


def test_close_ends_the_thread_and_leaves_an_unconcluded_part_hidden(tmp_path):
    before = threading.active_count()
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin(state(), 100)
    assert threading.active_count() == before + 1
    writer.wait()
    writer.close()
    writer.close()
    assert threading.active_count() == before
    assert checkpoints(tmp_path) == []


def test_close_of_a_writer_never_used_does_nothing(tmp_path):
    CheckpointWriter(tmp_path, keep=1).close()
    assert list(tmp_path.iterdir()) == []


def test_close_gives_up_a_part_that_is_being_written(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin({"big": torch.zeros(20_000_000)}, 100)
    writer.close()
    assert checkpoints(tmp_path) == []


def test_thread_does_not_keep_a_process_that_is_to_end(tmp_path):
    before = set(threading.enumerate())
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin(state(), 100)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    writer.close()


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


def test_discard_before_anything_was_begun_does_nothing(tmp_path):
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


def test_hidden_folders_of_a_crash_are_ignored_and_removed_by_the_next_save(tmp_path):
    save(tmp_path, state(mark=1.0), 100, keep=2)
    for name in (".samples-000000000200.partial", ".samples-000000000200.alone-1.partial", ".samples-1.replaced"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "rank-0.pt").write_bytes(b"half a file")
    assert newest_mark(tmp_path) == 1.0
    save(tmp_path, state(mark=3.0), 300, keep=2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, which can fill up and be made read-only."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount a small disk")
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_full_disk_is_an_os_error_that_leaves_the_old_checkpoint_and_no_rest(disk):
    save(disk, state(mark=1.0), 100, keep=1)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(disk, {"weights": torch.zeros(1_000_000)}, 200, keep=1)
    assert caught.value.errno == errno.ENOSPC
    assert newest_mark(disk) == 1.0
    assert len(list((disk / "checkpoints").iterdir())) == 1
    save(disk, state(mark=2.0), 300, keep=1)
    assert newest_mark(disk) == 2.0


@pytest.mark.parametrize("bytes_left", [0, 4096, ENOUGH])
def test_disk_that_fills_up_at_any_page_of_a_checkpoint_leaves_one_that_is_whole(disk, bytes_left):
    save(disk, state(mark=1.0), 100, keep=1)
    room = shutil.disk_usage(disk).free - bytes_left
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)
    refused: list[int | None] = []
    try:
        save(disk, state(mark=2.0), 200, keep=1)
    except OSError as error:
        refused = [error.errno]
    assert refused == ([] if bytes_left == ENOUGH else [errno.ENOSPC])
    assert newest_mark(disk) == (2.0 if bytes_left == ENOUGH else 1.0)
    assert len(list((disk / "checkpoints").iterdir())) == 1


def test_disk_made_read_only_fails_at_every_step_and_leaves_the_old_checkpoint(disk):
    save(disk, state(mark=1.0), 100, keep=1)
    with writers(disk, num_ranks=1) as (writer,):
        writer.begin(state(mark=2.0), 200)
        writer.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        writer.conclude()
        writer.wait()
        assert (writer.status, writer.error.errno) == ("failed", errno.EROFS)
        discard_together([writer])
        writer.begin(state(mark=3.0), 300)
        writer.wait()
        assert (writer.status, writer.error.errno) == ("failed", errno.EROFS)
        discard_together([writer])
        assert newest_mark(disk) == 1.0
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        write_together([writer], 400, mark=4.0)
    assert newest_mark(disk) == 4.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_made_read_only_is_an_os_error_that_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path, state(mark=1.0), 100, keep=1)
    (tmp_path / "checkpoints").chmod(0o500)
    try:
        with pytest.raises(OSError, match="Permission denied"):
            save(tmp_path, state(mark=2.0), 200, keep=1)
    finally:
        (tmp_path / "checkpoints").chmod(0o700)
    assert newest_mark(tmp_path) == 1.0


def test_run_folder_deleted_before_the_conclusion_fails_and_the_next_is_written(tmp_path):
    with writers(tmp_path / "run", num_ranks=1) as (writer,):
        writer.begin(state(), 100)
        writer.wait()
        shutil.rmtree(tmp_path / "run")
        writer.conclude()
        writer.wait()
        assert (writer.status, writer.error.errno) == ("failed", errno.ENOENT)
        discard_together([writer])
        write_together([writer], 200, mark=2.0)
    assert newest_mark(tmp_path / "run") == 2.0


def in_child(work: Callable[[], object], kill_at: int | None = None) -> int:
    """Run in a forked process, killed before the `kill_at`-th step it takes in the file system. Returns its pid."""
    if pid := os.fork():
        return pid
    count = 0

    def step(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "ctypes.dlsym"):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(step)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("samples", [100, 200])
def test_process_killed_before_any_step_of_a_save_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, samples):
    """With keep=1, once beside the old one and once in its place; every step until the save is through."""
    left = []
    for kill_at in range(1, MOST_STEPS):
        run_folder = tmp_path / str(kill_at)
        save(run_folder, state(mark=1.0), 100, keep=1)
        killed = was_killed(in_child(lambda folder=run_folder: save(folder, state(mark=2.0), samples, keep=1), kill_at))
        saved, problems = find_newest(run_folder)
        assert problems == []
        left.append(mark_of(saved.part(0)))
        save(run_folder, state(mark=3.0), 300, keep=1)
        assert newest_mark(run_folder) == 3.0
        assert len(list((run_folder / "checkpoints").iterdir())) == 1
        if not killed:
            break
    assert left == sorted(left)  # the old one, and from some step on the new one
    assert (left[0], left[-1]) == (1.0, 2.0)
    assert len(left) > 10


def test_ranks_killed_before_any_step_leave_the_old_checkpoint_or_the_new_one_whole(tmp_path):
    def write(run_folder: Path, token: str, mark: float, samples: int) -> None:
        with writers(run_folder, num_ranks=2, keep=1, token=token) as ranks:
            write_together(ranks, samples, mark)

    left = []
    for kill_at in range(1, MOST_STEPS, 2):
        run_folder = tmp_path / str(kill_at)
        write(run_folder, "first", 1.0, 100)
        killed = was_killed(in_child(lambda folder=run_folder: write(folder, "second", 5.0, 200), kill_at))
        saved, problems = find_newest(run_folder)
        marks = [mark_of(saved.part(rank)) for rank in range(2)]
        assert (marks, problems) in (([1.0, 2.0], []), ([5.0, 6.0], []))
        left.append(marks[0])
        write(run_folder, "third", 7.0, 300)
        assert len(list((run_folder / "checkpoints").iterdir())) == 1
        if not killed:
            break
    assert (left[0], left[-1]) == (1.0, 5.0)


def end_files_at(size: int) -> None:
    """From now on the system kills this process where it writes more than so many bytes into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_process_killed_at_any_byte_of_a_part_leaves_the_checkpoint_before_it_whole(tmp_path):
    """Of large parts, which are written in several pieces."""

    def write(number: int, at: int) -> None:
        end_files_at(at)
        save(tmp_path, state(mark=number, size=500_000), number, keep=2)

    folder, moments = save(tmp_path, state(mark=0, size=500_000), 0, keep=2), random.Random(0)
    whole = (folder / "rank-0.pt").stat().st_size
    for number in range(1, 11):
        at = moments.randrange(whole)
        assert was_killed(in_child(lambda number=number, at=at: write(number, at)))
        (partial,) = (tmp_path / "checkpoints").glob(".*/rank-0.partial")
        assert partial.stat().st_size == at
        saved, problems = find_newest(tmp_path)
        assert (mark_of(saved.part(0)), saved.samples_seen, problems) == (number - 1, number - 1, [])
        save(tmp_path, state(mark=number, size=500_000), number, keep=2)
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_open_checkpoint_finds_no_other_files_than_those_of_the_manifest(tmp_path):
    folder = save(tmp_path, state(), 100, keep=1)
    assert open_checkpoint(folder).num_ranks == 1
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-0.pt"]
