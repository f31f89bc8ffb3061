"""A search whose workers run elsewhere, with a cluster that is this process: what it says, keeps and refuses."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossbow_py.cli.launchers.crew import Ended
from crossbow_py.cli.launchers.placement import Machine, RayLauncher, Share
from crossbow_py.cli.launchers.ray_cluster import Place, PlacedJob
from crossbow_py.cli.launchers.ray_worker import machine_name
from crossbow_py.search import __main__ as search
from crossbow_py.search import placed
from crossbow_py.search.placed import words_of_workers
from tests.searches import report, search_digits, segments

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ON_RAY = ("launcher=ray", "launcher.num_workers=2")


class Worker:
    """Runs to its end when it is looked at for the first time."""

    is_placed, has_printed = True, False

    def __init__(self, job: PlacedJob, check: Callable[[], None]) -> None:
        self._job, self._check = job, check
        self._is_given_up = False

    def poll(self) -> Ended:
        if self._is_given_up:
            return Ended(143)
        self._check()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = search.main(list(self._job.words))
        return Ended(code, out.getvalue(), err.getvalue())

    def stop(self) -> None:
        self._is_given_up = True

    def close(self) -> None:
        pass


class Cluster:
    """A machine of two cores; `machine` is its name, None for this one's."""

    def __init__(self, machine: str | None = None, shares: bool = True) -> None:
        self.machine, self.shares, self.jobs = machine or machine_name(), shares, list[PlacedJob]()

    def machines(self) -> list[Machine]:
        return [Machine(2, 0)]

    def start(self, share: Share, job: PlacedJob, check: Callable[[Place], None]) -> Worker:
        self.jobs.append(job)
        sees = job.mark is not None and Path(job.mark).exists() and self.shares
        return Worker(job, lambda: check(Place(self.machine, True, sees)))


def connect(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Cluster:
    @contextlib.contextmanager
    def connected(_: RayLauncher) -> Iterator[Cluster]:
        yield cluster

    monkeypatch.setattr(placed, "connected", connected)
    return cluster


@pytest.mark.slow
def test_search_ends_with_the_best_of_its_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = connect(monkeypatch, Cluster())
    assert search_digits(*ON_RAY) == 0
    said, best = capsys.readouterr(), report()["best"]
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == "search_digits: 3 trials, by 2 workers that Ray places, each on 1 core"
    assert lines[1:3] == [f"storage journal:{Path('search').absolute() / 'search.journal'}", "writing to search"]
    assert f"  best           trial {best['trial']}: validation accuracy {best['value']:.4f} after 3 epochs" in lines
    assert f"  test accuracy  {best['test_accuracy']:.4f}" in lines
    assert sum(line.startswith("search_digits finished: 3 trials") for line in lines) == 1
    measured = [line for line in lines if line.startswith("trial ")]
    assert len(measured) == len(segments()) == len(set(segments()))
    for job in cluster.jobs:
        assert (job.command, job.folder) == ("search", str(Path.cwd()))
        assert job.words[-2:] == ["output_dir=search", "resume=auto"]
        assert not any(word.startswith("launcher") for word in job.words)
    assert list(Path("search").glob(".seen_*")) == []


@pytest.mark.slow
def test_search_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert search_digits() == 0
    before = report()["best"]
    capsys.readouterr()
    connect(monkeypatch, Cluster())
    assert search_digits(*ON_RAY) == 0
    said = capsys.readouterr().out
    assert f"going on: {len(segments())} of {len(segments())} rungs are done" in said
    assert report()["best"] == before


@pytest.mark.parametrize(
    ("cluster", "words", "said"),
    [
        (Cluster("other", shares=False), (), "an output_dir that they do not share"),
        (Cluster("other"), ("storage=sqlite:///a.db",), "storage=sqlite:///a.db and an output_dir that they share"),
        (Cluster(shares=False), (), "an output_dir that they do not share"),  # another container of this machine
    ],
)
def test_machine_that_shares_nothing_is_refused_and_leaves_nothing(
    cluster: Cluster, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    connect(monkeypatch, cluster)
    assert search_digits(*ON_RAY, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: workers on several hosts need a storage") and said in error
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_mistake_that_all_workers_find_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(monkeypatch, Cluster())
    assert search_digits(*ON_RAY, "data.validation_fraction=0") == 2
    said = capsys.readouterr()
    assert said.err.count("error:") == 1 and "set data.validation_fraction=0.1" in said.err
    assert "finished" not in said.out


def test_workers_have_the_words_of_the_search_and_its_folder() -> None:
    words = ["--config-dir=more", "+experiment=x", "output_dir=a", "++resume=null", "~space.batch_size", "seed=1"]
    assert words_of_workers(words, Path("/runs/b c")) == [
        "--config-dir=more", "+experiment=x", "~space.batch_size", "seed=1", 'output_dir="/runs/b c"', "resume=auto",
    ]  # fmt: skip
