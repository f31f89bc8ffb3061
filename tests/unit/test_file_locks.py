"""Locks that a killed process leaves free at once, whatever it had forked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from crossbow_py.file_locks import is_locked, locked


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
