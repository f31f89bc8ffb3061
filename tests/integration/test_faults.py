"""What production does to a run over several ranks: real signals, spoiled files and disks that refuse."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.data.sources.digits import Digits
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.checkpoints.checkpoint import MANIFEST, checkpoints, find_newest, part_name
from experiments.faults.campaign import Campaign, figures, resumed_from
from tests.trainers import measured
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


def measured_so_far(folder: Path) -> list[tuple[Any, ...]]:
    return measured(folder) if (folder / "metrics.jsonl").exists() else []


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


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("muon_adamw", marks=slow)])
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


@pytest.mark.slow
def test_best_model_of_a_killed_run_is_that_of_an_undisturbed_one(tmp_path):
    options = "restore_best=true", "optimizer.learning_rate=0.000001"  # accuracies hardly move, and the last is no best
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    with started(folder, ENDLESS, *options, num_ranks=1) as begun:
        await_true(lambda: any(line[0] for line in measured_so_far(folder)), begun)
        await_checkpoints(folder, 2, begun)
        begun.kill([0])
        begun.wait()
    stop = stop_after(folder)
    for own in (folder, undisturbed):
        assert train(own, stop, *options, num_ranks=1) == [0]
    assert last_resumed_from(folder) is not None
    assert outcome(folder) == outcome(undisturbed)
    mine, whole = read_summary(folder), read_summary(undisturbed)
    assert mine["model_epoch"] == whole["model_epoch"] < whole["epochs"]


@pytest.mark.parametrize("killed", [(1,), pytest.param((0,), marks=slow), pytest.param((0, 1), marks=slow)])
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


@pytest.mark.parametrize("rank", [pytest.param(0, marks=slow), 1])
def test_sigterm_to_one_rank_ends_both_with_143_and_a_checkpoint_to_go_on_from(tmp_path, rank, undisturbed):
    folder = tmp_path / "run"
    with started(folder, ENDLESS) as begun:
        await_checkpoints(folder, 2, begun)
        os.kill(begun.processes[rank].pid, signal.SIGTERM)
        assert begun.wait(PATIENCE_S) == [143, 143]
    summary = read_summary(folder)
    assert (summary["status"], summary["stop_reason"]) == ("terminated", "SIGTERM")
    assert samples_of(checkpoints(folder)[0]) == summary["samples_seen"]
    stop = stop_after(folder)
    assert train(folder, stop) == [0, 0]
    assert outcome(folder) == undisturbed(stop)


def flip(checkpoint: Path) -> None:
    part = checkpoint / part_name(1)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (flip, OTHER_HASH),
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


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=slow)])
def test_run_killed_goes_on_with_another_number_of_ranks_from_the_same_z(tmp_path, num_ranks):
    folder = tmp_path / "run"
    begin(folder)
    newest, end = checkpoints(folder)[0], stop_after(folder)
    before = find_newest(newest)[0].part(0)["bank"]
    stop = f"max_samples={samples_of(newest)}"
    assert train(folder, stop, num_ranks=num_ranks) == [0] * num_ranks  # nothing is left, but a checkpoint of its own
    assert sorted(path.name for path in newest.glob("*.pt")) == [part_name(rank) for rank in range(num_ranks)]
    after = find_newest(newest)[0].part(0)["bank"]
    for name in ("z", "z_prev"):
        assert all(torch.equal(before[name][key], after[name][key]) for key in before[name])
    assert train(folder, end, num_ranks=num_ranks) == [0] * num_ranks
    assert last_resumed_from(folder) == samples_of(newest)
    summary = read_summary(folder)
    assert summary["status"] == "finished"
    assert summary["test_accuracy"] > 0.9


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@slow
@needs_root
def test_disk_that_is_full_in_mid_training_is_told_and_checkpoints_come_again_with_room(small_disk, tmp_path):
    folder = small_disk / "run"
    with started(folder, ENDLESS) as begun:
        await_checkpoints(folder, 2, begun)
        fill(small_disk / "others")
        await_true(lambda: "No space left on device" in said(folder), begun)
        assert begun.runs
        (small_disk / "others").unlink()
        await_checkpoints(folder, 2, begun)
        os.kill(begun.processes[0].pid, signal.SIGTERM)
        assert begun.wait(PATIENCE_S) == [143, 143]
    assert train(folder, f"max_samples={samples_of(checkpoints(folder)[0]) + 64}") == [0, 0]


def fill(path: Path) -> None:
    """All the room there is."""
    with path.open("wb", buffering=0) as file:
        for _ in itertools.count():
            try:
                file.write(bytes(4096))
            except OSError:
                return
