"""Opens a search's Optuna storage by its address, journals included, and retries operations that fail.

All of Optuna's private attributes that a search takes are here, tried with Optuna 5.0: the number by which a storage
knows a trial, and the client of a gRPC proxy, which has no time limit of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import SplitResult, urlsplit

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import BaseJournalBackend, JournalRedisBackend
from optuna.trial import FrozenTrial

from crossbow_py.core.errors import CrossbowError, SearchError, UserError, one_line, without_query_password
from crossbow_py.core.files import given_path, locked

if TYPE_CHECKING:  # only data bases need it
    from sqlalchemy import URL, Engine

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DATABASES = ("sqlite", "postgresql", "mysql")
_REDIS = ("redis", "rediss")
_GRPC, _GRPC_PORT = "grpc", 13000  # the port of Optuna's proxy
_SQLITE_WAIT_S = 1.0  # for its lock; then it is our turn to be patient
_LONGEST_SHOWN = 200
_WAITS_S = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_PATIENCE_S = 30.0  # after which nothing is tried again: a server that does not answer takes its time at every try
_CONNECT_S, _ANSWER_S = 5, 10
# A connection whose other end is gone without a word ends by itself.
_LIBPQ = {
    "connect_timeout": _CONNECT_S, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}  # fmt: skip
_MYSQL = {"connect_timeout": _CONNECT_S, "read_timeout": _ANSWER_S, "write_timeout": _ANSWER_S}
_CONNECT_ARGS: dict[str, dict[str, Any]] = {
    "psycopg": _LIBPQ, "psycopg2": _LIBPQ, "pymysql": _MYSQL, "mysqldb": _MYSQL,
    "pysqlite": {"timeout": _SQLITE_WAIT_S},
}  # fmt: skip
_PIP = {"psycopg": '"psycopg[binary]"', "psycopg2": "psycopg2-binary", "mysqldb": "mysqlclient", "pymysql": "pymysql"}
# A worker that stands still within a transaction must not hold its locks for good.
_LIMITS = ("SET lock_timeout = '10s'", "SET idle_in_transaction_session_timeout = '30s'")
_JOURNAL_BEGIN, _SQLITE_BEGIN = b'{"op_code":', b"SQLite format 3\x00"  # every record of a journal begins so
# Tables that are not there or unlike Optuna's, for which SQLite has no code of its own, a torn file, another file.
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PASSING = (OSError, StorageInternalError)
_CLIENTS = ("grpc", "redis", "sqlalchemy")  # packages all of whose errors may pass
_POLL_S = 0.002
# A password up to the last @ before the host; SQLAlchemy ends it at the first.
_PASSWORD = re.compile(r"(?<=://)([^:/@]*:)[^@]*@([^?]*@)?")


class StorageError(SearchError):
    """The storage of a search cannot be used, or what it holds cannot be read; what was finished stays in it."""


class BadStorageError(StorageError, UserError):
    """A storage holds what no worker of this search has written."""

    exit_code = 2

    def __init__(self, address: str, found: str) -> None:
        super().__init__(
            f"the search's storage {address} holds what this search cannot have written: {found}; restore it from a "
            "copy, or give another storage."
        )


class UnansweredError(StorageError, UserError):
    """A storage never answered, so that nothing has begun."""

    exit_code = 2


class Patience:
    """Calls of a storage, made again a few times for what may pass: a lock, a full disk, a lost connection.

    A call that failed may have been done all the same, so only what may be done twice is called through it.

    Args:
        address: the name of the storage in errors.
        sleep: waits for some seconds.
    """

    def __init__(self, address: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.address, self._sleep, self._has_answered = address, sleep, False

    def call(self, do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call `do`, and return what it returns.

        Raises:
            StorageError: it failed every time, or for half a minute.
            UnansweredError: so did all before it.
            BadStorageError: Optuna cannot make sense of what is in it, or SQLite cannot.
        """
        begun_s = time.monotonic()
        for tries, wait_s in enumerate((*_WAITS_S, None), start=1):
            try:
                returned = do(*args, **kwargs)
            except Exception as error:
                if not _may_pass(error):
                    if isinstance(error, CrossbowError | OptunaError | ImportError):
                        raise
                    # A record that lacks something makes Optuna raise nearly anything.
                    found = f"{one_line(error)[:_LONGEST_SHOWN]} while it is read"
                    raise BadStorageError(self.address, found) from error
                if wait_s is None or time.monotonic() - begun_s > _PATIENCE_S:
                    raise self._given_up(error, tries) from error
                self._sleep(wait_s)
            else:
                self._has_answered = True
                return returned
        raise AssertionError("the last try returns or raises")

    def _given_up(self, error: Exception, tries: int) -> StorageError:
        if getattr(_cause(error), "sqlite_errorcode", None) in _DAMAGED:
            return BadStorageError(self.address, _text_of(error))
        failure = f"the search's storage {self.address} cannot be used, tried {tries} times: {_text_of(error)}"
        check = "see that it is there (a server: that it runs), writable, not full and not locked by another program"
        if not self._has_answered:
            return UnansweredError(f"{failure}; {check}, or give another storage.")
        return StorageError(
            f"{failure}. What was finished stays in it: {check}, and start the same command again, which goes on from "
            "there."
        )


def _may_pass(error: Exception) -> bool:
    """Return whether a call that failed so may do what it is to when it is made again."""
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, _PASSING) or not packages.isdisjoint(_CLIENTS)


def open_storage(storage: str, sleep: Callable[[float], None] = time.sleep) -> BaseStorage:
    """Open the storage at an address.

    Args:
        storage: `journal:PATH`, or a path that ends in .log or .journal, is a file, for the processes of one host;
            an URL such as sqlite:///PATH (one host too), postgresql://... or mysql://... is a data base; redis://... is
            a journal in Redis; grpc://HOST:PORT is Optuna's proxy of another storage.
        sleep: waits for some seconds.

    Raises:
        UserError: another address, a folder that does not exist, what is no search, or a storage without its package.
        StorageError: it cannot be opened.
    """
    silence_optuna()
    patience = Patience(shown_address(storage), sleep)
    if storage.startswith("journal:") or ("://" not in storage and storage.endswith((".log", ".journal"))):
        path = given_path("storage", storage.removeprefix("journal:"))
        _require_file(path, _JOURNAL_BEGIN, "journal of a search")
        return patience.call(lambda: JournalStorage(JournalFile(path)))
    kind = storage.partition("://")[0] if "://" in storage else ""
    if kind == _GRPC:
        _require_package("grpc", "grpcio", storage)
        return patience.call(_open_proxy, _server_at(storage))
    if kind in _REDIS:
        _require_package("redis", "redis", storage)
        _server_at(storage)
        return patience.call(lambda: JournalStorage(RedisJournal(storage)))
    if kind.partition("+")[0] not in _DATABASES:
        remedy = "; write postgresql://" if kind == "postgres" else ""
        raise UserError(
            f"storage must be journal:PATH, a path that ends in .log or .journal, or an URL "
            f"({', '.join(f'{name}://' for name in (*_DATABASES, _REDIS[0], _GRPC))}), got {shown_address(storage)!r}"
            f"{remedy}."
        )
    _require_package("sqlalchemy", "SQLAlchemy", storage)
    return patience.call(_open_database, storage)


def close_connections(storage: BaseStorage) -> None:
    """Close the connections to a data base, which are made anew where the storage is used again. Does not raise."""
    engine = getattr(getattr(storage, "_backend", None), "engine", None)
    if engine is not None:
        with suppress(Exception):
            storage.remove_session()
            engine.dispose()


def id_of(trial: FrozenTrial) -> int:
    """Return the number by which a storage knows a trial."""
    number: int = trial._trial_id
    return number


def shown_address(storage: str) -> str:
    """Return the address without its password."""
    return _PASSWORD.sub(r"\1***@", without_query_password(storage))


def silence_optuna() -> None:
    """Leave out the lines that Optuna prints for every study and trial; its warnings stay."""
    optuna.logging.set_verbosity(max(optuna.logging.get_verbosity(), optuna.logging.WARNING))


def _require_package(package: str, install: str, storage: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"storage={shown_address(storage)} needs {package}, which is not installed; run pip install {install}."
        )


def _server_at(storage: str) -> SplitResult:
    """Return the parts of the address of a server. Raises UserError."""
    parts = urlsplit(storage)
    with suppress(ValueError):  # of a port that is none
        if parts.hostname and parts.port != 0:
            return parts
    raise UserError(
        f"storage must name a host, with a port or without, got {shown_address(storage)!r}; write "
        f"{parts.scheme}://HOST:PORT."
    )


def _open_proxy(server: SplitResult) -> BaseStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        proxy: Any = GrpcStorageProxy(host=server.hostname or "", port=server.port or _GRPC_PORT)
    # Calls of its client wait for ever for a server that has taken them and stands still.
    proxy._stub = proxy._cache.grpc_client = _WithDeadline(proxy._stub)
    opened: BaseStorage = proxy
    return opened


class _WithDeadline:
    """The calls of a gRPC stub, each with a time limit."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._stub, name), timeout=_ANSWER_S)


def _open_database(storage: str) -> BaseStorage:
    from sqlalchemy.engine import make_url  # noqa: PLC0415  an extra, as below
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    driver = ""
    if (found := _PASSWORD.search(storage)) and found[2]:
        raise UserError(
            f"storage must have one @, before the host, got {shown_address(storage)!r}; write any other as %40."
        )
    try:
        url = make_url(storage)
        driver = url.get_dialect().driver
        if url.get_backend_name() == "sqlite":
            if url.database in (None, "", ":memory:"):
                raise UserError(
                    f"storage={storage} is a data base in memory, which ends with the process; give sqlite:///PATH."
                )
            _require_file(Path(url.database), _SQLITE_BEGIN, "SQLite data base")
        opened = RDBStorage(storage, {"connect_args": _connect_args(url, driver)})
    except ImportError as error:
        install = f"run pip install {_PIP[driver]}" if driver in _PIP else "install it"
        raise UserError(
            f"storage: the Python driver for {shown_address(storage)} is not installed ({error.__cause__ or error}); "
            f"{install}, or give a journal file."
        ) from error
    except (ArgumentError, ValueError) as error:
        raise UserError(
            f"storage is no URL of a data base: {shown_address(storage)!r} ({error}); "
            "write it as sqlite:///PATH or postgresql://USER@HOST/NAME."
        ) from error
    if url.get_backend_name() == "sqlite":
        _lock_whole_transactions(opened.engine)
    if url.get_backend_name() == "postgresql":
        _limit_waits(opened.engine)
    return get_storage(opened)


def _connect_args(url: URL, driver: str) -> dict[str, Any]:
    """Return what the driver is told beside the address, which may say otherwise."""
    return {key: value for key, value in _CONNECT_ARGS.get(driver, {}).items() if key not in url.query}


def _limit_waits(engine: Engine) -> None:
    """Have PostgreSQL end what waits for a lock for too long, and transactions that nothing happens in."""
    from sqlalchemy import event  # noqa: PLC0415

    def limit(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            for statement in _LIMITS:
                cursor.execute(statement)
        connection.commit()

    event.listen(engine, "connect", limit)
    engine.dispose()  # connections made before


def _lock_whole_transactions(engine: Engine) -> None:
    """Have SQLite take its lock when a transaction begins.

    Its Python driver takes it at the first write: two that had read the same trial as unfinished would then both
    finish it, where other data bases lock the row that is read.
    """
    from sqlalchemy import event  # noqa: PLC0415

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


def _text_of(error: BaseException) -> str:
    """Return the error text of the storage; Optuna's own text is the same for everything."""
    cause = _cause(error)
    details = getattr(cause, "details", None)  # of gRPC, whose text is of many lines
    return f"{type(cause).__name__}: {details() if callable(details) else cause}".splitlines()[0].rstrip(".")


def _cause(error: BaseException) -> BaseException:
    """Return the error of the disk or of the data base's driver."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return getattr(cause, "orig", None) or cause


class JournalFile(BaseJournalBackend):
    """A search's journal: Optuna's records as JSON lines of the file `path`, which is created where there is none.

    The format is that of Optuna's own journal files, so that its dashboard reads them. The difference is what a crash
    leaves behind. Optuna's next writer appends to a line that was torn, which makes the whole file unreadable, and
    waits half a minute for the lock file of a process that was killed. This one cuts off a torn line, which no reader
    has counted, before it writes the next, and the kernel drops the lock with its holder.

    Safe for any number of processes of one host, each with its own object. On network file systems it is as safe as
    their locks are: for several hosts a data base is the better storage.

    Args:
        path: absolute, or in the working folder of now.
        lock_wait_s: how long another process may write before it counts as stuck.

    Raises (all methods):
        OSError: the file is gone, was cut, cannot be read or written, or is locked by another process for now.
        BadStorageError: a line in it is no record.
    """

    def __init__(self, path: Path, lock_wait_s: float = 5.0) -> None:
        self._path, self._lock_wait_s = path.resolve(), lock_wait_s  # it may be a link of the user's
        self._starts = [0]  # in bytes, of each record read so far and of the one to come
        self._path.touch()

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return all whole records from the given one on. A last line without its end is being written, or was torn."""
        with self._path.open("rb") as file:
            self._require_what_was_read(os.fstat(file.fileno()).st_size)
            file.seek(self._starts[log_number_from])
            lines = file.read().split(b"\n")[:-1]
        records = []
        for index, line in enumerate(lines, start=log_number_from):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "op_code" not in record:
                raise self._damaged(f"line {index + 1}")
            records.append(record)
        for index, line in enumerate(lines, start=log_number_from):
            if index + 1 == len(self._starts):
                self._starts.append(self._starts[index] + len(line) + 1)
        return records

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; they are on the disk when this returns."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._require_what_was_read(self._path.stat().st_size)  # before the lock, which would make a new file
        with self._exclusive(), self._path.open("a+b") as file:
            file.seek(self._starts[-1])
            torn = file.read().rpartition(b"\n")[2]
            if torn:
                if torn[: len(_JOURNAL_BEGIN)] != _JOURNAL_BEGIN[: len(torn)]:  # somebody's text, given by mistake
                    raise self._damaged("the last line")
                file.truncate(file.tell() - len(torn))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _require_what_was_read(self, size: int) -> None:
        if size < self._starts[-1]:
            raise OSError(f"{self._path} was cut or replaced: {self._starts[-1]} bytes had been read, it has {size}")

    def _damaged(self, where: str) -> BadStorageError:
        return BadStorageError(str(self._path), f"{where} is no record of a search")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        def busy() -> None:
            raise BlockingIOError(f"another process writes to {self._path}")

        # Not waited for in the kernel, where a stopped process would hold up all others for good.
        until = time.monotonic() + self._lock_wait_s
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(locked(self._path, busy))
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_POLL_S)
            yield


class RedisJournal(BaseJournalBackend):
    """A search's journal in Redis, in the form of Optuna's.

    It leaves out the snapshots of Optuna's, which are pickles: nothing that others may have written is unpickled.

    Args:
        url: redis://... or rediss://..., as redis-py has it.

    Raises (all methods):
        OSError: records that had been read are gone, as after a restart of a Redis that keeps nothing on a disk.
        redis.RedisError: the server does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        redis: Any = importlib.import_module("redis")  # an extra

        limits = f"socket_connect_timeout={_CONNECT_S}&socket_timeout={_ANSWER_S}"
        url = f"{url}{'&' if urlsplit(url).query else '?'}{limits}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._backend = JournalRedisBackend(url)
        self._client = redis.Redis.from_url(url)

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return all records from the given one on."""
        last = self._client.get(":log_number")
        count = 0 if last is None else int(last) + 1
        if count < log_number_from:
            raise OSError(f"Redis was emptied: {log_number_from} records had been read, it has {count}")
        if count == log_number_from:
            return []
        found = self._client.mget([f":log:{number}" for number in range(log_number_from, count)])
        if None in found:
            raise OSError(f"Redis has lost record {log_number_from + found.index(None)} of {count}")
        return [json.loads(record) for record in found]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, each at once or not at all."""
        self._backend.append_logs(logs)
