"""Addresses of storages, and patience with what may pass."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import locked
from crossbow_py.search.study.storage import JournalFile, Patience, StorageError, open_storage, shown_address


@pytest.mark.parametrize("address", ["journal:{}/a", "{}/a.log", "{}/a.journal", "sqlite:///{}/a.db"])
def test_storage_of_an_address_keeps_a_study(tmp_path: Path, address: str) -> None:
    place = address.format(tmp_path)
    number = open_storage(place).create_new_study([StudyDirection.MINIMIZE], "mine")
    again = open_storage(place)
    assert again.get_study_id_from_name("mine") == number
    again.remove_session()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("results.csv", "^storage must be journal:PATH, .*, got 'results.csv'.$"),
        ("postgres://me@host/x", "got 'postgres://me@host/x'; write postgresql://.$"),
        ("mongodb://host", "^storage must be journal:PATH, .*, got 'mongodb://host'.$"),
        ("grpc://:13000", "^storage must name a host, with a port or without, got 'grpc://:13000'; write "),
        ("grpc://host:x", "^storage must name a host, with a port or without, got 'grpc://host:x'; write"),
        ("sqlite://:x:y", "^storage is no URL of a data base: .*; write it as sqlite:///PATH or postgresql://USER@"),
        ("journal:{}/none/a", "^storage: the folder .*/none does not exist; make it, or give another.$"),
        ("sqlite:///{}/none/a.db", "^storage: the folder .*/none does not exist"),
        ("sqlite://", "^storage=sqlite:// is a data base in memory, which .*; give sqlite:///PATH.$"),
        ("sqlite:///:memory:", "^storage=sqlite:///:memory: is a data base in memory"),
        ("postgresql://me:sec@ret@host/x", "^storage must have one @, .*//me:...@host/x'; write any other as %40"),
        ("postgresql://host:5432/x?user=a@b&password=c@d", "^storage must have one @, .*; write any other as %40"),
        ("sqlite:///{}", "^storage: .* is a folder; give a file.$"),
        ("journal:{}", "^storage: .* is a folder; give a file.$"),
        ("sqlite:///{}/notes.txt", "^storage: .*/notes.txt is no SQLite data base; give another path, or move the"),
        ("journal:{}/" + 300 * "x", "^storage must have names of at most 255 bytes .*; choose a shorter one.$"),
        ("journal:~nobody-there/a", "^storage=~nobody-there/a is in the home folder of an unknown user; write the who"),
        ("sqlite:///{}/" + 300 * "x", "^storage: .*xxx can be no file .File name too long.; give another path.$"),
        ("journal:{}/notes.txt", "^storage: .*/notes.txt is no journal of a search; give another path, or move the"),
        (
            "mysql+nothing://me:secret@host/x",
            "^storage is no URL of a data base: 'mysql.nothing://me:...@host/x'",
        ),
    ],
)
def test_storage_of_an_address_that_is_none_is_the_users_mistake(tmp_path: Path, address: str, said: str) -> None:
    (tmp_path / "notes.txt").write_text("milk and bread, milk and bread")
    with pytest.raises(UserError, match=said):
        open_storage(address.format(tmp_path))


def test_data_base_is_told_how_long_to_wait_unless_its_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def stop(address: str, options: Any) -> None:
        told.append(options["connect_args"])
        raise ImportError("no driver")

    monkeypatch.setattr("crossbow_py.search.study.storage.RDBStorage", stop)
    for address in ("postgresql://me@host/x", "postgresql+psycopg2://host/x?connect_timeout=60", "sqlite:///a.db"):
        with pytest.raises(UserError):
            open_storage(address)
    assert (told[0]["connect_timeout"], told[0]["tcp_user_timeout"]) == (5, 30_000)
    assert "connect_timeout" not in told[1] and "tcp_user_timeout" in told[1]
    assert told[2] == {"timeout": 1.0}


@pytest.mark.parametrize(
    ("address", "package", "install"),
    [
        ("redis://host", "redis", "redis"), ("grpc://host:1", "grpc", "grpcio"),
        ("sqlite:///a.db", "sqlalchemy", "SQLAlchemy"),
    ],
)  # fmt: skip
def test_storage_without_its_package_names_what_to_install(
    address: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else "found")
    said = f"^storage={address} needs {package}, which is not installed; run pip install {install}.$"
    with pytest.raises(UserError, match=said):
        open_storage(address)


def test_address_is_shown_without_its_password() -> None:
    assert shown_address("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"
    assert shown_address("postgresql://host/x?user=me&password=p@ss") == "postgresql://host/x?user=me&password=***"
    assert shown_address("redis://host?db=1&password=secret") == "redis://host?db=1&password=***"
    assert shown_address("postgresql://me:se@cr/e@t@host:1/x") == "postgresql://me:***@host:1/x"
    assert shown_address("redis://:se@cret@host") == "redis://:***@host"
    assert "secret" not in shown_address("postgresql://host:port/x?password=secret")
    assert "secret" not in shown_address("://me:secret@host") and shown_address("runs/a.log") == "runs/a.log"


@pytest.mark.slow
def test_sqlite_transaction_that_reads_keeps_others_from_writing(tmp_path: Path) -> None:
    """So that nobody finishes a trial between another's look at it and what it does about it."""
    address = f"sqlite:///{tmp_path}/a.db"
    first, second = open_storage(address)._backend, open_storage(address)._backend  # type: ignore[attr-defined]
    with first.engine.connect() as reading:
        reading.exec_driver_sql("SELECT * FROM trials").all()
        with pytest.raises(StorageInternalError) as caught:
            second.create_new_study([StudyDirection.MINIMIZE], "mine")
    assert "database is locked" in str(caught.value.__cause__)
    second.create_new_study([StudyDirection.MINIMIZE], "mine")
    first.remove_session(), second.remove_session()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown.journal", "AssertionError.* while it is read"),
        ("lacking.journal", "KeyError.* while it is read"),
        ("garbage.journal", "line 2 is no record of a search"),
        ("torn.db", "DatabaseError: database disk image is malformed"),
    ],
)
def test_storage_that_is_damaged_is_the_users_to_mend_and_stays_as_it_is(tmp_path: Path, name: str, said: str) -> None:
    record = b'{"op_code":0,"worker_id":"w","study_name":"a","directions":[1]}\n'
    (tmp_path / "unknown.journal").write_bytes(b'{"op_code":77,"worker_id":"w"}\n')
    (tmp_path / "lacking.journal").write_bytes(record + b'{"op_code":4,"worker_id":"w"}\n')
    (tmp_path / "garbage.journal").write_bytes(record + b"\xff\x00garbage\n")
    open_storage(f"sqlite:///{tmp_path}/torn.db").remove_session()
    (tmp_path / "torn.db").write_bytes((tmp_path / "torn.db").read_bytes()[:20_000])
    before = (tmp_path / name).read_bytes()
    address = f"sqlite:///{tmp_path}/{name}" if name.endswith(".db") else str(tmp_path / name)
    with pytest.raises(
        UserError, match=f"holds what .* written: {said}; restore it from a copy, or give another storage.$"
    ) as caught:
        open_storage(address, sleep=lambda _: None)
    assert caught.value.exit_code == 2
    assert (tmp_path / name).read_bytes() == before


def test_data_base_of_another_program_is_the_users_to_move_away(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as database, database:
        database.execute("CREATE TABLE studies (mine INTEGER)")
    storage = open_storage(f"sqlite:///{tmp_path}/a.db")
    with pytest.raises(UserError, match=r"^the search's storage here holds .*no such column"):
        Patience("here", lambda _: None).call(storage.get_all_studies)
    storage.remove_session()


def test_patience_with_what_passes_gives_its_value() -> None:
    slept: list[float] = []
    left: list[Exception] = [OSError("locked"), StorageInternalError("x")]

    def use(value: int) -> int:
        if left:
            raise left.pop()
        return value

    assert Patience("here", slept.append).call(use, 3) == 3
    assert slept == [0.01, 0.05]


def test_patience_with_what_stays_ends_in_one_sentence_after_seconds() -> None:
    slept: list[float] = []

    def use() -> None:
        raise StorageInternalError("An exception is raised during the commit.") from OSError(28, "No space left")

    patience = Patience("here", slept.append)
    patience.call(len, "what answers once")
    with pytest.raises(StorageError, match="^the search's storage here cannot be used, tried 9 times: OSErr") as caught:
        patience.call(use)
    assert "No space left" in str(caught.value) and "What was finished stays in it" in str(caught.value)
    assert caught.value.exit_code == 1 and 5 < sum(slept) < 10


def test_patience_with_what_never_answered_speaks_of_nothing_finished() -> None:
    def use() -> None:
        raise OSError("refused")

    said = "OSError: refused; see that it is there .*not locked by another program, or give another storage.$"
    with pytest.raises(StorageError, match=said) as caught:
        Patience("here", lambda _: None).call(use)
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 2


def test_patience_with_what_will_not_pass_raises_it_at_once() -> None:
    def use() -> None:
        raise UpdateFinishedTrialError("finished")

    slept: list[float] = []
    with pytest.raises(UpdateFinishedTrialError):
        Patience("here", slept.append).call(use)
    assert slept == []


def test_storage_opened_leaves_optunas_lines_out_and_the_root_logger_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    storage = open_storage(f"{tmp_path}/a.log")
    storage.create_new_study([StudyDirection.MINIMIZE], "mine")
    assert capfd.readouterr() == ("", "") and (root.level, list(root.handlers)) == before
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    open_storage(f"{tmp_path}/a.log")
    assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    optuna.logging.set_verbosity(optuna.logging.WARNING)


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
