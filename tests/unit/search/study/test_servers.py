"""Storages that are servers: workers share a search through them, and one that does not answer is one sentence."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal._base import BaseJournalSnapshot
from optuna.study import StudyDirection

from crossbow_py.search.study import storage as module
from crossbow_py.search.study.storage import RedisJournal, StorageError, open_storage
from tests.postgres import postgres
from tests.unit.search.study.shared_studies import SEGMENTS, Clock, done, optuna_trials, worker
from tests.unit.search.study.test_claims import MANY, said_by_two_processes


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as (address, _):
        yield address


@pytest.fixture
def database(server: str, request: pytest.FixtureRequest) -> str:
    """The address of an empty data base."""
    name = f"of_{abs(hash(request.node.name))}"
    with importlib.import_module("psycopg").connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server.rpartition('/')[0]}/{name}"


@pytest.fixture
def proxy() -> Iterator[str]:
    """The address of Optuna's proxy of a storage in memory."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server  # noqa: PLC0415  what its command runs for ever

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = make_server(InMemoryStorage(), "127.0.0.1", port)
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(0).wait()


def assert_two_workers_share(address: str) -> None:
    clock = Clock()
    first, second = worker(address, "first", clock), worker(address, "second", clock)
    assert first.params(0) == second.params(0)
    assert first.claim(SEGMENTS[:3]) == SEGMENTS[:3] and second.claim(SEGMENTS) == SEGMENTS[3:]
    assert done(first, SEGMENTS[0], 0.25) and second.results() == {SEGMENTS[0]: 0.25}
    assert [first.num_searchers(), second.num_searchers()] == [2, 2]
    clock.now += 11.0
    second.renew()
    assert second.claim(SEGMENTS[:2]) == SEGMENTS[1:2]
    assert done(first, SEGMENTS[1], 0.5) is False and done(second, SEGMENTS[1], 0.75)
    assert first.results() == {SEGMENTS[0]: 0.25, SEGMENTS[1]: 0.75}
    assert optuna_trials(address)[0].intermediate_values == {1000: 0.25}


def test_workers_share_a_search_through_postgresql(database: str) -> None:
    assert_two_workers_share(database)


def test_two_processes_share_a_search_through_postgresql_none_twice(database: str) -> None:
    first, second = said_by_two_processes(database)
    assert first[0] == second[0]
    assert sorted(first[1] + second[1]) == [[each.trial, each.rung] for each in MANY]


def test_postgresql_that_ends_is_one_sentence_and_what_was_finished_is_there_again() -> None:
    with postgres() as (address, server):
        study = worker(address)
        study.params(0)
        study.claim(SEGMENTS[:1])
        assert done(study, SEGMENTS[0])
        server.kill()
        server.wait()
        with pytest.raises(StorageError, match=f"^the search's storage {address} cannot be used, tried 9 times: Oper"):
            study.results()


def test_postgresql_ends_transactions_in_which_nothing_happens(database: str) -> None:
    """So that a worker that was stopped in one keeps nobody waiting."""
    engine = open_storage(database)._backend.engine  # type: ignore[attr-defined]
    with engine.connect() as connection:
        found = [
            connection.exec_driver_sql(f"SHOW {name}").scalar()
            for name in ("lock_timeout", "idle_in_transaction_session_timeout")
        ]
    engine.dispose()
    assert found == ["10s", "30s"]


def test_workers_share_a_search_through_optunas_proxy(proxy: str) -> None:
    assert_two_workers_share(proxy)


def test_proxy_that_is_not_there_is_one_sentence() -> None:
    pytest.importorskip("grpc")
    with pytest.raises(StorageError, match="^the search's storage grpc://127.0.0.1:1 cannot be used, tried 9 times"):
        worker("grpc://127.0.0.1:1")


def test_proxy_that_stands_still_is_one_sentence_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as standing:
        address = f"grpc://127.0.0.1:{standing.getsockname()[1]}"
        with pytest.raises(StorageError, match=f"storage {address} cannot be used, tried 9 times: .*: Deadline Exceed"):
            worker(address)


class Redis:
    """What a Redis has, as far as a journal asks for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.urls: list[str] = []

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def mget(self, keys: list[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def setnx(self, key: str, value: int) -> None:
        self.values.setdefault(key, str(value).encode())

    def eval(self, script: str, num_keys: int, prefix: str, record: str) -> None:
        """The script of Optuna's backend."""
        number = int(self.values[f"{prefix}:log_number"]) + 1
        self.values[f"{prefix}:log_number"] = str(number).encode()
        self.values[f"{prefix}:log:{number}"] = record.encode()


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> Redis:
    """In place of the client's package, which may be missing, and of its use in Optuna's backend."""
    kept = Redis()

    def from_url(url: str) -> Redis:
        kept.urls.append(url)
        return kept

    package = SimpleNamespace(Redis=SimpleNamespace(from_url=from_url))
    monkeypatch.setitem(sys.modules, "redis", package)
    backend = sys.modules[module.JournalRedisBackend.__module__]
    monkeypatch.setattr(backend, "redis", package, raising=False)
    monkeypatch.setattr(backend, "_imports", SimpleNamespace(check=lambda: None))
    return kept


def test_workers_share_a_search_through_redis(redis: Redis) -> None:
    first, second = (JournalStorage(RedisJournal("redis://host:1/2")) for _ in range(2))
    number = first.create_new_study([StudyDirection.MINIMIZE], "mine")
    trial = second.create_new_trial(number)
    first.set_trial_user_attr(trial, "rung", 3)
    assert second.get_trial(trial).user_attrs == {"rung": 3}
    assert [each.study_name for each in JournalStorage(RedisJournal("redis://host:1/2")).get_all_studies()] == ["mine"]
    assert redis.urls[0] == "redis://host:1/2?socket_connect_timeout=5&socket_timeout=10"


def test_snapshot_in_redis_which_is_a_pickle_is_not_read(redis: Redis) -> None:
    redis.values[":snapshot"] = b"cos\nsystem\n(S'touch unpickled'\ntR."
    journal = RedisJournal("redis://host")
    assert not isinstance(journal, BaseJournalSnapshot)
    assert JournalStorage(journal).get_all_studies() == []
    assert not Path("unpickled").exists()


def test_redis_that_was_emptied_or_lost_a_record_is_no_empty_search(redis: Redis) -> None:
    journal = RedisJournal("redis://host")
    storage = JournalStorage(journal)
    storage.create_new_study([StudyDirection.MINIMIZE], "mine")
    storage.create_new_study([StudyDirection.MINIMIZE], "other")
    del redis.values[":log:1"]
    with pytest.raises(OSError, match="Redis has lost record 1 of 2"):
        journal.read_logs(0)
    redis.values.clear()
    with pytest.raises(OSError, match="Redis was emptied: 2 records had been read, it has 0"):
        storage.get_all_studies()


def test_address_with_options_of_the_client_keeps_them(redis: Redis) -> None:
    RedisJournal("rediss://host?db=2")
    assert redis.urls[-1].startswith("rediss://host?db=2&socket_connect_timeout=5")
