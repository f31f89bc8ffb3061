"""Writing checkpoints while something is killed, full, read-only or deleted: an intact one always remains."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crossbow_py.train.checkpoints.checkpoint import find_newest
from crossbow_py.train.checkpoints.writer import save
from tests.unit.train.checkpoints.marked_checkpoints import (
    discard_together,
    mark_of,
    newest_mark,
    state,
    write_together,
    writers,
)

MOST_STEPS = 200
ENOUGH = 8192  # a page for the part and one for its hash, or for the manifest


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
    """A separate file system that can fill up and be made read-only."""
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
    """Run in a forked process that is killed before its `kill_at`-th file system operation. Returns its pid."""
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


@pytest.mark.slow
@pytest.mark.parametrize("samples", [100, 200])
def test_process_killed_before_any_step_of_a_save_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, samples):
    """With keep=1, once beside the old one and once in its place; at every step until the save is complete."""
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


@pytest.mark.slow
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
