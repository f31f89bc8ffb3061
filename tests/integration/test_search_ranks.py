"""A search of several ranks: each trains its share, one speaks, and none waits for another that is gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.search_processes import NINE_TRIALS, Outcome, ended, outcome, search_in, started_ranks, workers
from tests.searches import segments
from tests.training_processes import PATIENCE_S, await_true, children, environment, popen, said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Where a single process ends."""
    folder = tmp_path_factory.mktemp("alone") / "search"
    assert search_in(folder) == 0
    return outcome(folder)


@pytest.mark.slow
def test_ranks_share_the_trials_of_one_folder_and_the_first_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started_ranks(folder, "num_trials=6", "max_epochs=1", "method=none") as ranks:
        assert [ended(rank) for rank in ranks] == [0, 0]
    assert sorted(segments(folder)) == [(trial, 0) for trial in range(6)]
    names = [f"{os.uname().nodename}:{rank.pid}" for rank in ranks]
    assert workers(folder).keys() == set(names)
    printed, log = (tmp_path / "search.log").read_text(), (folder / "console.log").read_text()
    assert printed.count("search_digits: 6 trials on digits") == printed.count("search_digits finished") == 1
    assert log.count("search_digits: 6 trials on digits") == log.count("search_digits finished") == 2
    assert f"worker {names[0]}" in printed and f"worker {names[1]}" in log


@pytest.mark.slow
def test_ranks_end_where_a_single_process_does(alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started_ranks(folder) as ranks:
        assert [ended(rank) for rank in ranks] == [0, 0]
    assert outcome(folder) == alone
    assert len(workers(folder)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("whom", [0, 1])
def test_rank_that_is_killed_holds_up_no_other(whom: int, alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with started_ranks(folder) as ranks:
        await_true(lambda: (folder / "search.journal").exists() and len(workers(folder)) == 2, ranks[0])
        ranks[whom].kill()
        assert ended(ranks[1 - whom]) == 0
    assert outcome(folder) == alone


def test_mistake_is_said_once_and_leaves_nothing(tmp_path: Path) -> None:
    with started_ranks(tmp_path / "search", "data.validation_fraction=0") as ranks:
        assert [ended(rank) for rank in ranks] == [2, 2]
    printed = (tmp_path / "search.log").read_text()
    assert printed.count("error:") == 1 and "set data.validation_fraction=0.1" in printed
    assert not (tmp_path / "search").exists()


def test_gpu_by_its_number_is_refused_with_the_rule_of_ranks(tmp_path: Path) -> None:
    with started_ranks(tmp_path / "search", "device=cuda:1") as ranks:
        assert [ended(rank) for rank in ranks] == [2, 2]
    printed = (tmp_path / "search.log").read_text()
    assert printed.count("error:") == 1
    assert "set device=cuda, and each rank takes the GPU of its own number on the host" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rank_killed_under_torchrun_is_started_again_and_goes_on_in_its_folder(alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    options = ["packing=none", f"output_dir={folder.name}", "resume=null"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, *torchrun, "-m", "crossbow_py.search", *NINE_TRIALS, *options]
    with popen(command, tmp_path / "out", environment()) as launcher:
        await_true(lambda: (folder / "search.journal").exists() and len(workers(folder)) == 2, launcher)
        os.kill(children(launcher.pid)[1], signal.SIGKILL)
        assert launcher.wait(2 * PATIENCE_S) == 0, said(tmp_path / "out")
    assert outcome(folder) == alone
    assert len(workers(folder)) >= 3
