"""Where a search is kept: a storage of Optuna's, opened by its address, and patience with it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import optuna
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from crossbow_py.core.errors import CrossbowError, UserError, one_line
from crossbow_py.core.files import given_path
from crossbow_py.search.study.journal import BEGIN, BadStorageError, JournalFile, StorageError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DATABASES = ("sqlite", "postgresql", "mysql")
_SQLITE_WAIT_S = 1.0  # for its lock; then it is our turn to be patient
_LONGEST_SHOWN = 200
_WAITS_S = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_JOURNAL_BEGIN, _SQLITE_BEGIN = BEGIN, b"SQLite format 3\x00"
# Tables that are not there or unlike Optuna's, for which SQLite has no code of its own, a torn file, another file.
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PASSING = (OSError, StorageInternalError, SQLAlchemyError)


class Patience:
    """Calls of a storage, made again a few times for what may pass: a lock, a full disk, a lost connection.

    A call that failed may have been done all the same, so only what may be done twice is called through it.

    Args:
        place: the storage, for errors.
        sleep: takes seconds.
    """

    def __init__(self, place: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._place, self._sleep = place, sleep

    def call(self, do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `do` returns.

        Raises:
            StorageError: it failed every time.
            BadStorageError: Optuna cannot make sense of what is in it, or SQLite cannot.
        """
        for wait_s in (*_WAITS_S, None):
            try:
                return do(*args, **kwargs)
            except _PASSING as error:
                if wait_s is None:
                    raise self._unusable(error) from error
                self._sleep(wait_s)
            except (CrossbowError, OptunaError, ImportError, ArgumentError):
                raise
            except Exception as error:  # a record that lacks something makes Optuna raise nearly anything
                raise BadStorageError(self._place, f"{one_line(error)[:_LONGEST_SHOWN]} while it is read") from error
        raise AssertionError("the last try returns or raises")

    def _unusable(self, error: BaseException) -> StorageError:
        if getattr(_cause(error), "sqlite_errorcode", None) in _DAMAGED:
            return BadStorageError(self._place, _said(error))
        return StorageError(
            f"the search's storage {self._place} cannot be used, tried {len(_WAITS_S) + 1} times: {_said(error)}. "
            "What was finished stays in it: see that it is there, writable, not full and not locked by another "
            "program, and start the same command again, which goes on from there."
        )


def open_storage(storage: str, sleep: Callable[[float], None] = time.sleep) -> BaseStorage:
    """The storage at an address.

    Args:
        storage: `journal:PATH`, or a path that ends in .log or .journal, is a file, for the processes of one host;
            an URL such as sqlite:///PATH (one host too), postgresql://... or mysql://... is a data base.
        sleep: takes seconds.

    Raises:
        UserError: another address, a folder that does not exist, what is no search, or a data base without its driver.
        StorageError: it cannot be opened.
    """
    silence_optuna()
    patience = Patience(shown_address(storage), sleep)
    if storage.startswith("journal:") or ("://" not in storage and storage.endswith((".log", ".journal"))):
        path = given_path("storage", storage.removeprefix("journal:"))
        _require_file(path, _JOURNAL_BEGIN, "journal of a search")
        return patience.call(lambda: JournalStorage(JournalFile(path)))
    if storage.partition("://")[0].partition("+")[0] not in _DATABASES:
        raise UserError(
            f"storage must be journal:PATH, a path that ends in .log or .journal, or the URL of a data base "
            f"({', '.join(f'{name}://' for name in _DATABASES)}), got {shown_address(storage)!r}."
        )
    return patience.call(_open_database, storage)


def shown_address(storage: str) -> str:
    """The address without its password."""
    try:
        return make_url(storage).render_as_string(hide_password=True) if "://" in storage else storage
    except (ArgumentError, ValueError):
        return storage.rpartition("@")[2]


def silence_optuna() -> None:
    """Leave out the lines that Optuna prints for every study and trial; its warnings stay."""
    optuna.logging.set_verbosity(max(optuna.logging.get_verbosity(), optuna.logging.WARNING))


def _open_database(storage: str) -> BaseStorage:
    is_sqlite = storage.startswith("sqlite")
    try:
        url = make_url(storage)
        if is_sqlite and url.database:
            _require_file(Path(url.database), _SQLITE_BEGIN, "SQLite data base")
        opened = RDBStorage(storage, {"connect_args": {"timeout": _SQLITE_WAIT_S}} if is_sqlite else None)
    except ImportError as error:
        raise UserError(
            f"storage: the Python driver for {shown_address(storage)} is not installed "
            f"({error.__cause__ or error}); install it, or give a journal file."
        ) from error
    except (ArgumentError, ValueError) as error:
        raise UserError(
            f"storage is no URL of a data base: {shown_address(storage)!r} ({error}); write it as sqlite:///PATH or "
            "postgresql://USER@HOST/NAME."
        ) from error
    if is_sqlite:
        _lock_whole_transactions(opened.engine)
    return get_storage(opened)


def _lock_whole_transactions(engine: Engine) -> None:
    """Have SQLite take its lock when a transaction begins.

    Its Python driver takes it at the first write: two that had read the same trial as unfinished would then both
    finish it, where other data bases lock the row that is read.
    """

    def leave_transactions_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", leave_transactions_to_us)
    event.listen(engine, "begin", begin)
    engine.dispose()  # connections made before


def _require_file(path: Path, begin: bytes, kind: str) -> None:
    """Raise UserError where there can be no such file, or is another one, which does not `begin` so."""
    folder = path.absolute().parent
    try:
        has_folder, is_folder = folder.is_dir(), path.is_dir()
    except OSError as error:  # names that are too long, folders that may not be entered
        raise UserError(f"storage: {path} can be no file ({error.strerror}); give another path.") from error
    if not has_folder:
        raise UserError(f"storage: the folder {folder} does not exist; make it, or give another.")
    if is_folder:
        raise UserError(f"storage: {path} is a folder; give a file.")
    if path.exists() and not path.is_file():
        raise UserError(f"storage: {path} is no file; give another path.")
    with suppress(OSError), path.open("rb") as file:  # what cannot be read for now is tried again
        found = file.read(len(begin))
        if not begin.startswith(found):
            raise UserError(f"storage: {path} is no {kind}; give another path, or move the file away.")


def _said(error: BaseException) -> str:
    """What the storage said; Optuna's own text is the same for everything."""
    said = _cause(error)
    return f"{type(said).__name__}: {said}".splitlines()[0]


def _cause(error: BaseException) -> BaseException:
    """The error of the disk or of the data base's driver."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return getattr(cause, "orig", None) or cause
