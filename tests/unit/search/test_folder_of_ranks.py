"""The folder that ranks search in: one for all that see it, else one of each host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import RankError, UserError
from crossbow_py.distributed.launch import Launch, process_name
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.search import folder
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import SearchFolder, mark_joined, open_search_folder, opened_folder
from tests.thread_ranks import on_threads

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
BASE = compose(["+experiment=search_digits"], SearchConfig)
DATABASE = "postgresql://me@host/name"


def config(**changes: Any) -> SearchConfig:
    return dataclasses.replace(BASE, **changes)


def opened(ranks: Ranks, config: SearchConfig) -> SearchFolder:
    with opened_folder(config, ranks) as found:
        return found


def on_hosts(monkeypatch: pytest.MonkeyPatch, seen: list[bool]) -> None:
    """Two hosts of two ranks, of which those see the first one's folder."""
    monkeypatch.setattr(folder, "_seen_by", lambda *_: seen)


class OnHosts:
    """Opens a folder as one of two ranks of two hosts."""

    def __call__(self, ranks: Ranks, config: SearchConfig) -> SearchFolder:
        ranks.node, ranks.num_nodes, ranks.local_rank, ranks.num_local = ranks.rank // 2, 2, ranks.rank % 2, 2
        return opened(ranks, config)


def test_ranks_of_a_host_have_the_folder_of_the_first() -> None:
    first, *others = on_threads(opened, 3, config())
    assert first.is_made and not first.is_known
    assert others == [SearchFolder(first.path, is_known=True)] * 2
    assert [path.name for path in first.path.iterdir()] == ["config.yaml"]  # and no mark of the ranks'
    again = on_threads(opened, 2, config())
    assert [each.path for each in again] == [first.path] * 2 and again[0].is_known


def test_rank_without_others_has_what_a_process_has() -> None:
    assert opened(Ranks(), config()).is_made


def test_mistake_of_the_first_rank_is_that_of_all_and_leaves_nothing() -> None:
    found = on_threads(opened, 2, config(resume="nowhere"))
    assert [type(each) for each in found] == [UserError, RankError]
    assert all("resume=nowhere is not the folder of a search" in str(each) for each in found)
    assert list(Path().iterdir()) == []


@contextmanager
def refused(ranks: Ranks) -> Iterator[Path]:
    """The folder of a search that a rank finds a mistake in."""
    with opened_folder(config(output_dir="mine"), ranks) as found:
        yield found.path
        with ranks.together():
            if ranks.rank == 1:
                raise UserError("a mistake")


def test_mistake_that_another_rank_finds_takes_the_folder_back() -> None:
    def run(ranks: Ranks) -> None:
        with refused(ranks):
            pass

    assert [type(each) for each in on_threads(run, 2)] == [RankError, RankError]
    assert not Path("mine").exists()


def test_mistake_after_others_have_joined_leaves_the_folder_to_them() -> None:
    def run(ranks: Ranks) -> None:
        with refused(ranks) as path:
            if ranks.rank == 1:
                mark_joined(SearchFolder(path, is_known=True))

    on_threads(run, 2)
    assert Path("mine/config.yaml").exists()


def test_hosts_that_share_the_folder_use_it_with_the_journal_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, [True] * 4)
    found = on_threads(OnHosts(), 4, config(output_dir="shared"))
    assert [each.path for each in found] == [Path("shared")] * 4


def test_hosts_that_do_not_share_the_folder_have_one_each_with_a_data_base(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, [True, True, False, False])
    found = on_threads(OnHosts(), 4, config(storage=DATABASE, resume=None))
    assert [each.is_known for each in found] == [False, True, False, True]
    assert found[0].path == found[1].path != found[2].path == found[3].path


@pytest.mark.parametrize(
    ("seen", "storage", "said"),
    [
        (False, None, "got storage=null and an output_dir that they do not share; set storage=postgresql://"),
        (False, "sqlite:///a.db", "got storage=sqlite:///a.db and an output_dir that they do not share"),
        (True, "sqlite:///a.db", "got storage=sqlite:///a.db and an output_dir that they share; set storage=postg"),
        (True, "journal:a.log", "got storage=journal:a.log and an output_dir that they share"),
    ],
)
def test_hosts_that_would_not_share_what_they_find_are_refused(
    seen: bool, storage: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hosts(monkeypatch, [True, True, seen, seen])
    found = on_threads(OnHosts(), 4, config(storage=storage))
    assert [type(each) for each in found] == [UserError, *[RankError] * 3]
    assert all("ranks on several hosts need a storage" in str(each) and said in str(each) for each in found)
    assert list(Path("runs/search_digits").glob("2*")) == []


@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mysql+pymysql", "grpc", "redis", "rediss"])
def test_server_serves_several_hosts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, [True, True, False, False])
    found = on_threads(OnHosts(), 4, config(storage=f"{kind}://host"))
    assert all(isinstance(each, SearchFolder) for each in found)


@pytest.mark.parametrize("output_dir", [None, "mine"])
def test_ranks_that_torchrun_starts_again_go_on_in_their_folder_without_resume(output_dir: str | None) -> None:
    launch = Launch("job", [process_name(1)])
    fresh = config(resume=None, output_dir=output_dir)
    first = open_search_folder(fresh, launch)
    assert not first.is_known
    assert open_search_folder(fresh, launch) == SearchFolder(first.path, is_known=True)
    other = Launch("job", ["another"])
    if output_dir:
        with pytest.raises(UserError, match="output_dir=mine already holds a search"):
            open_search_folder(fresh, other)
    else:
        assert open_search_folder(fresh, other).path != first.path
        (first.path / "search.json").write_text('{"status": "finished"}')
        assert not open_search_folder(fresh, launch).is_known
