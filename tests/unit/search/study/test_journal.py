"""The journal file: what crashes, other files and other writers leave it as."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from crossbow_py.core.file_locks import locked
from crossbow_py.search.study.journal import JournalFile, StorageError


def records(count: int) -> list[dict[str, int]]:
    return [{"op_code": 0, "index": index} for index in range(count)]


def refuse() -> None:
    raise BlockingIOError("busy")


def test_journal_read_from_any_record_gives_that_and_all_later_ones(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "a.log")
    journal.append_logs(records(3))
    other = JournalFile(tmp_path / "a.log")
    assert list(other.read_logs(0)) == records(3)
    assert list(other.read_logs(2)) == records(3)[2:]
    journal.append_logs(records(1))
    assert list(other.read_logs(3)) == records(1) and list(other.read_logs(1)) == [*records(3)[1:], *records(1)]


@pytest.mark.parametrize("kept", [1, 5, 15, 23])  # of the 24 bytes of a record and its end
def test_journal_torn_at_any_byte_loses_the_torn_record_only(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.log"
    JournalFile(path).append_logs(records(3))
    whole = path.read_bytes()
    assert len(whole) == 3 * 24
    path.write_bytes(whole[: 2 * 24 + kept])
    reader, writer = JournalFile(path), JournalFile(path)
    assert list(reader.read_logs(0)) == records(2)
    writer.append_logs(records(1))
    assert list(reader.read_logs(2)) == records(1)
    assert list(JournalFile(path).read_logs(0)) == [*records(2), *records(1)]


def test_journal_of_a_writer_killed_midway_holding_the_lock_goes_on_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    journal = JournalFile(path, lock_wait_s=0.05)
    journal.append_logs(records(1))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with locked(path, refuse), path.open("ab") as file:
            file.write(b'{"op_code":0,"in')
            file.flush()
            os.write(write, b".")
            signal.pause()
        os._exit(0)
    os.read(read, 1)
    with pytest.raises(BlockingIOError, match="another process writes to"):
        journal.append_logs(records(1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    journal.append_logs(records(1))
    assert list(journal.read_logs(0)) == [*records(1), *records(1)]


def test_journal_of_optuna_is_read_and_its_lock_file_of_a_killed_process_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    made = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name="made")
    made.add_trial(optuna.trial.create_trial(value=0.5))
    (tmp_path / "a.log.lock").symlink_to(path)
    storage = JournalStorage(JournalFile(path))
    study = optuna.load_study(storage=storage, study_name="made")
    study.add_trial(optuna.trial.create_trial(value=0.25))
    (tmp_path / "a.log.lock").unlink()
    assert [trial.value for trial in made.trials] == [0.5, 0.25]


@pytest.mark.parametrize("text", [b"step,loss\n0,1.5\n", b'{"loss": 1.5}\n', b"[]\n"])
def test_journal_that_is_another_file_is_named_with_its_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.log").write_bytes(text)
    with pytest.raises(StorageError, match="a.log holds what .* written: line 1 is no record of a search"):
        JournalFile(tmp_path / "a.log").read_logs(0)


def test_journal_that_is_a_text_without_an_end_of_line_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"my notes")
    journal = JournalFile(tmp_path / "a.log")
    with pytest.raises(StorageError, match="a.log holds what .* written: the last line is no record"):
        journal.append_logs(records(1))
    assert (tmp_path / "a.log").read_bytes() == b"my notes"


def test_journal_that_is_gone_or_cut_while_in_use_is_no_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    journal = JournalFile(path)
    journal.append_logs(records(2))
    list(journal.read_logs(0))
    path.write_bytes(path.read_bytes()[:25])
    for use in (lambda: journal.append_logs(records(1)), lambda: journal.read_logs(2)):
        with pytest.raises(OSError, match="was cut or replaced: 48 bytes had been read, it has 25"):
            use()
    path.unlink()
    for use in (lambda: journal.append_logs(records(1)), lambda: journal.read_logs(2)):
        with pytest.raises(FileNotFoundError):
            use()
    assert not path.exists()
