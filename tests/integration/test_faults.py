"""What production does to a run over several ranks: real signals, spoiled files and disks that refuse."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.data.sources.digits import Digits
from crossbow_py.train.checkpoints.checkpoint import MANIFEST, checkpoints, part_name
from experiments.faults.campaign import Campaign, figures, resumed_from
from tests.training_processes import (
    DIGITS,
    PATIENCE_S,
    await_checkpoints,
    await_true,
    inside,
    is_root,
    outcome,
    said,
    start_with_own_mounts,
    started,
    train,
)

pytestmark = pytest.mark.timeout(300)
slow = pytest.mark.slow
ENDLESS = "max_epochs=10000"
OTHER_HASH = "is corrupted: the hash of rank-1.pt differs"
needs_root = pytest.mark.skipif(not is_root(), reason="mounts need root")
Outcome = tuple[bytes, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Of two ranks, by where they stop."""

    @functools.cache
    def trained(stop: str) -> Outcome:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        assert train(folder, stop) == [0, 0]
        return outcome(folder)

    return trained


def stop_after(folder: Path) -> str:
    """An end that what is in `folder` has not reached, however far it came before it was stopped."""
    return f"max_epochs={max(3, samples_of(checkpoints(folder)[0]) // Digits.NUM_TRAIN + 2)}"


def begin(folder: Path, num_checkpoints: int = 3) -> None:
    """Two ranks, killed after so many checkpoints."""
    with started(folder, ENDLESS) as begun:
        await_checkpoints(folder, num_checkpoints, begun)
        begun.kill([0, 1])
        begun.wait()


def samples_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_resumed_from(folder: Path) -> int | None:
    return resumed_from((folder / "console.log").read_text())[-1]


@pytest.mark.parametrize(
    ("executor", "num_kills"), [("threads", 2), *(pytest.param(each, 5, marks=slow) for each in ("serial", "threads"))]
)
def test_kills_of_one_run_leave_the_bits_of_an_undisturbed_one(tmp_path, executor, num_kills):
    run = Campaign(tmp_path, epochs=4, seed=1).run(1, executor, num_kills, "run").to_plain()
    found = figures([run])
    assert found["kills"] + found["before_first"] >= 1
    assert found["resumed"] == found["kills"]
    assert found["afresh"] == found["before_first"]
    assert (found["corrupt"], found["ended"], found["equal_models"], found["equal_lines"]) == (0, 1, 1, 1)


@slow
@pytest.mark.parametrize("optimizer", ["muon", "muon_adamw"])
def test_muon_killed_goes_on_with_the_bits_of_an_undisturbed_run(tmp_path, optimizer):
    options = f"optimizer={optimizer}", "model.hidden=[32,32]", "averaging=synchronous_sgd"
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    with started(folder, ENDLESS, *options, num_ranks=1, executor="fused") as begun:
        await_checkpoints(folder, 2, begun)
        begun.kill([0])
        begun.wait()
    newest, stop = samples_of(checkpoints(folder)[0]), stop_after(folder)
    for own in (folder, undisturbed):
        assert train(own, stop, *options, num_ranks=1, executor="fused") == [0]
    assert last_resumed_from(folder) == newest
    assert outcome(folder) == outcome(undisturbed)


@slow
@pytest.mark.parametrize("killed", [(1,), (0,), (0, 1)])
def test_ranks_killed_end_the_others_and_a_resume_equals_the_undisturbed_run(tmp_path, killed, undisturbed):
    folder = tmp_path / "run"
    with started(folder, ENDLESS) as begun:
        await_checkpoints(folder, 2, begun)
        begun.kill(killed)
        codes = begun.wait(PATIENCE_S)
    assert codes == [-signal.SIGKILL if rank in killed else 1 for rank in range(2)]
    if len(killed) == 1:
        assert "another rank has ended, or its host cannot be reached any more" in said(folder)
    newest, stop = samples_of(checkpoints(folder)[0]), stop_after(folder)
    assert train(folder, stop) == [0, 0]
    assert last_resumed_from(folder) == newest
    assert outcome(folder) == undisturbed(stop)


def flip(checkpoint: Path) -> None:
    part = checkpoint / part_name(1)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(flip, OTHER_HASH, marks=slow),
        pytest.param(lambda found: os.truncate(found / part_name(1), 1000), OTHER_HASH, marks=slow),
        pytest.param(lambda found: (found / part_name(1)).unlink(), "cannot be read (FileNotFoundError", marks=slow),
        pytest.param(lambda found: (found / MANIFEST).unlink(), "has no readable manifest.json", marks=slow),
        pytest.param(shutil.rmtree, None, marks=slow),
    ],
    ids=["flip", "cut", "no part", "no manifest", "nothing"],
)
def test_spoiled_checkpoint_is_passed_over_with_a_word_and_the_bits_stay(tmp_path, spoil, why, undisturbed):
    folder = tmp_path / "run"
    begin(folder)
    (newest, older), stop = checkpoints(folder)[:2], stop_after(folder)
    spoil(newest)
    assert train(folder, stop) == [0, 0]
    assert last_resumed_from(folder) == samples_of(older)
    log = (folder / "console.log").read_text()
    if why:
        assert f"{newest} {why}" in log
        assert "falling back to the one before" in log
    assert outcome(folder) == undisturbed(stop)


@pytest.mark.slow
@needs_root
def test_disk_read_only_for_one_rank_is_told_by_the_first_and_training_goes_on(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    arguments = [*DIGITS, "executor=serial", f"output_dir={folder}", ENDLESS]
    begun = start_with_own_mounts(arguments, tmp_path / "output.log", rank=1, num_ranks=2, shared=folder)
    try:
        pid = begun.processes[1].pid
        await_checkpoints(folder, 2, begun)
        await_true(lambda: inside(pid, "mount", "-o", "remount,bind,ro", str(folder)), begun)  # a file is being written
        refused = "No checkpoint was written (rank 1 cannot write its part); training goes on, make room soon."
        await_true(lambda: refused in said(tmp_path), begun)
        assert inside(pid, "mount", "-o", "remount,bind,rw", str(folder))
        await_checkpoints(folder, 2, begun)
        os.kill(pid, signal.SIGTERM)
        assert begun.wait(PATIENCE_S) == [143, 143]
    finally:
        begun.kill([rank for rank in (0, 1) if begun.processes[rank].is_alive()])
        begun.wait()
