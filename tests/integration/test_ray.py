"""Jobs on Ray as users start them: on this machine, and on two nodes that are processes of it.

A search ends where a single process does, whoever is killed on the way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crossbow_py.telemetry.records import read_summary
from tests.search_processes import NINE_TRIALS, Outcome, outcome, search_in, workers
from tests.training_processes import PATIENCE_S, await_true, environment, is_alive, popen, said

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONG_S = 2 * PATIENCE_S
ON_RAY = ["launcher=ray", "launcher.num_workers=2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Where a single process ends."""
    folder = tmp_path_factory.mktemp("alone") / "search"
    assert search_in(folder) == 0
    return outcome(folder)


def command(folder: Path, *words: str) -> list[str]:
    """Of a search in `folder`; each trial by itself needs no measuring of packs."""
    own = ["packing=none", f"output_dir={folder.name}", *words]
    return [sys.executable, "-m", "crossbow_py.search", *NINE_TRIALS, *own]


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a cluster, and its process: a line to it removes a node."""
    with (folder / "nodes.log").open("w") as log:
        cluster = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes"], env=environment(), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        assert address, (folder / "nodes.log").read_text()
        yield address, cluster
    finally:
        cluster.stdin.close()
        cluster.wait(PATIENCE_S)
        cluster.stdout.close()


def both_train(folder: Path) -> bool:
    """Whether each of two workers has finished a segment."""
    return (folder / "search.journal").exists() and len(workers(folder)) == 2


def pids(folder: Path) -> list[int]:
    """The processes of the workers."""
    return [int(name.rpartition(":")[2]) for name in sorted(workers(folder))]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_workers_on_this_machine_end_where_a_single_process_does(alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with popen(command(folder, *ON_RAY), tmp_path / "out", environment()) as driver:
        assert driver.wait(LONG_S) == 0, said(tmp_path / "out")
    assert outcome(folder) == alone
    printed = said(tmp_path / "out")
    assert printed.count("search_digits finished: 9 trials") == 1 and "error:" not in printed
    assert sum(line.startswith("trial ") for line in printed.splitlines()) == 13
    assert len(workers(folder)) == 2


@pytest.mark.parametrize("whom", ["worker", "holder"])
def test_worker_that_is_killed_is_started_again(whom: str, alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with popen(command(folder, *ON_RAY), tmp_path / "out", environment()) as driver:
        await_true(lambda: both_train(folder), driver)
        victim = pids(folder)[1]
        os.kill(victim if whom == "worker" else parent(victim), signal.SIGKILL)
        await_true(lambda: not is_alive(victim), driver)
        assert driver.wait(LONG_S) == 0, said(tmp_path / "out")
    assert outcome(folder) == alone
    assert "is started again, 1 of 3 times" in said(tmp_path / "out")


def test_node_that_is_removed_loses_no_trial(alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with two_nodes(tmp_path) as (address, cluster):
        on_nodes = command(folder, "launcher=ray", f"launcher.address={address}")
        with popen(on_nodes, tmp_path / "out", environment()) as driver:
            await_true(lambda: both_train(folder), driver)
            both = pids(folder)
            for pid in both:  # so that the search does not end before Ray knows that the node is gone
                os.kill(pid, signal.SIGSTOP)
            assert cluster.stdin is not None
            cluster.stdin.write("remove\n")
            cluster.stdin.flush()
            await_true(lambda: "is started again, 1 of 3 times" in said(tmp_path / "out"), driver)
            for pid in filter(is_alive, both):
                os.kill(pid, signal.SIGCONT)
            assert driver.wait(LONG_S) == 0, said(tmp_path / "out")
    assert outcome(folder) == alone
    assert "raylet" not in said(tmp_path / "out")  # Ray itself says nothing


def test_command_that_is_killed_leaves_no_worker_and_goes_on_when_it_is_started_again(
    alone: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "search"
    with popen(command(folder, *ON_RAY), tmp_path / "out", environment()) as driver:
        await_true(lambda: both_train(folder), driver)
        driver.kill()
        driver.wait(PATIENCE_S)
    await_true(lambda: not any(map(is_alive, pids(folder))))
    with popen(command(folder, *ON_RAY), tmp_path / "again", environment()) as driver:
        assert driver.wait(LONG_S) == 0, said(tmp_path / "again")
    assert "going on: " in said(tmp_path / "again")
    assert outcome(folder) == alone
    assert list(folder.glob(".seen_*")) == []


def test_ctrl_c_ends_all_workers_with_their_trials_and_the_same_command_goes_on(alone: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with popen(command(folder, *ON_RAY), tmp_path / "out", environment()) as driver:
        await_true(lambda: both_train(folder), driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(LONG_S) == 130, said(tmp_path / "out")
    assert not any(map(is_alive, pids(folder)))
    printed = said(tmp_path / "out")
    assert "search_digits interrupted: 9 trials" in printed and "  to go on " in printed
    assert (folder / "console.log").read_text().count("search_digits terminated: 9 trials") == 2
    with popen(command(folder, *ON_RAY), tmp_path / "again", environment()) as driver:
        assert driver.wait(LONG_S) == 0, said(tmp_path / "again")
    assert "going on: " in said(tmp_path / "again")
    assert outcome(folder) == alone


def test_sweep_has_the_folders_codes_and_table_of_a_plain_one(tmp_path: Path) -> None:
    words = ["+experiment=digits", "model.hidden=[32]", "device=cpu", "precision=fp32", "executor=serial"]
    swept = [sys.executable, "-m", "crossbow_py.train", "-m", *ON_RAY, *words, "+debug=fast"]
    swept += ["batch_size=16,5000,8", "output_dir=swept"]
    with popen(swept, tmp_path / "out", environment()) as driver:
        assert driver.wait(LONG_S) == 2, said(tmp_path / "out")  # the second is refused when it starts
    printed = said(tmp_path / "out")
    assert "launcher=ray starts 3 runs, 2 at a time, each on " in printed
    for number, name in enumerate(["batch_size=16", "batch_size=5000", "batch_size=8"], start=1):
        assert printed.count(f"run {number} of 3: {name}\n") == 1
    assert printed.count("error: ") == 1
    assert printed.rstrip().endswith("compare them: python -m crossbow_py.report swept")
    assert sorted(path.name for path in (tmp_path / "swept").iterdir()) == ["batch_size=16", "batch_size=8"]
    for size in (16, 8):
        assert read_summary(tmp_path / "swept" / f"batch_size={size}")["samples_seen"] == 2 * 2 * size
