"""Locks that a killed process leaves free at once, whatever it had forked."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from crossbow_py.core.file_locks import is_locked, locked


def refuse() -> None:
    raise BlockingIOError("busy")


def test_lock_is_held_inside_and_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path, refuse):
        assert is_locked(path)
        with pytest.raises(BlockingIOError, match="busy"), locked(path, refuse):
            pass
        assert is_locked(path)
    assert not is_locked(path)


def test_lock_that_cannot_be_written_counts_as_held(tmp_path: Path) -> None:
    assert is_locked(tmp_path / "nowhere" / ".lock")
    with pytest.raises(FileNotFoundError), locked(tmp_path / "nowhere" / ".lock", refuse):
        pass


def test_forked_process_that_outlives_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    read, write = os.pipe()
    holder = os.fork()
    if not holder:
        with locked(path, refuse):
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
            signal.pause()
        os._exit(0)
    child = int(os.read(read, 20))
    try:
        assert is_locked(path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.kill(child, 0)  # it lives
        assert not is_locked(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read), os.close(write)


@pytest.mark.slow
def test_process_forked_while_another_thread_locks_does_not_hold_the_lock(tmp_path: Path) -> None:
    path, ended = tmp_path / ".lock", threading.Event()

    def lock_often() -> None:
        with suppress(BlockingIOError):  # the new process has it for a moment
            while not ended.is_set():
                with locked(path, refuse):
                    pass

    read, write = os.pipe()
    for _ in range(20):
        ended.clear()
        thread = threading.Thread(target=lock_often)
        thread.start()
        child = os.fork()
        if not child:
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)  # it lives
        ended.set()
        thread.join()
        is_left = is_locked(path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not is_left
    os.close(read), os.close(write)
