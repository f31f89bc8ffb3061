"""Ranks that end, hang or compute something else: the others find out, and say it."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from datetime import datetime
from pathlib import Path

import pytest

from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.telemetry.records import read_summary
from tests import rank_jobs
from tests.ranks import Raised, answer_of, on_ranks, started
from tests.thinned import thinned
from tests.trainers import images

SOON_S = 10.0  # beyond what is promised, for a machine that is busy


@pytest.mark.parametrize("rank", thinned([0, 1], quick=[1], slow=[0]))
def test_z_that_differs_by_a_bit_on_one_of_three_ranks_is_found_and_the_rank_named(rank):
    found = on_ranks(rank_jobs.spoil_z, 3, {"executor": "serial"}, {"max_epochs": 3}, 2, rank)
    first, *others = found
    assert first.kind == "CentralModelError"
    assert f"the central average model of rank {rank} differs from the others' before round" in first.text
    for other in others:
        assert (other.kind, other.exit_code) == ("RankError", 1)
        assert first.text in other.text


def test_z_that_differs_is_found_in_the_next_round_that_is_checked():
    options = {"train_data": images(200), "distributed": DistributedSettings(check_every_rounds=4)}
    first, _ = on_ranks(rank_jobs.spoil_z, 2, options, {"max_rounds": 40}, 5, 1)
    assert first.kind == "CentralModelError"
    assert "of rank 1 differs from the others' before round 8:" in first.text


def test_metric_that_fails_on_one_rank_ends_the_other_too():
    begun = time.monotonic()
    other, failed = on_ranks(rank_jobs.evaluate_in_fours, 2, {"metrics": {"broken": rank_jobs.broken_on_rank_1}})
    for each in (other, failed):
        assert "metrics['broken'] fails on a batch" in each.text and "no such class" in each.text
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("executor", thinned(["serial", "threads"], quick=[1], slow=[0]))
def test_rank_that_ends_is_noticed_at_once(tmp_path, executor):
    begun = time.monotonic()
    arguments = ({"executor": executor}, 5, "exit", str(tmp_path / "stderr"))
    lost, ended = on_ranks(rank_jobs.end_in_a_round, 2, *arguments, timeout_s=300.0)
    assert ended == 9
    assert isinstance(lost, Raised)
    assert (lost.kind, lost.exit_code) == ("RankLostError", 1)
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("executor", thinned(["threads", "serial"], quick=[0]))
def test_rank_that_hangs_is_named_by_the_other_which_ends(tmp_path, executor):
    stderr = tmp_path / "stderr"
    arguments = ({"executor": executor}, 5, "stop", str(stderr))
    with started(rank_jobs.end_in_a_round, 2, *arguments, timeout_s=3.0) as (first, second):
        begun = time.monotonic()
        assert answer_of(*first) == 1
        seconds = time.monotonic() - begun
        assert second[0].is_alive()
        os.kill(second[0].pid, signal.SIGKILL)
    said = Path(f"{stderr}.0").read_text()
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    pid = Path(f"{stderr}.pid.1").read_text()
    assert re.match(r"error: rank 0 has waited for \d+ s \(distributed\.timeout_s=3\) for rank 1 \(", line)
    assert f"process {pid}), which appears to hang: its last task was" in line
    assert re.search(r"round 5, since \S+, last heard of \d+ s ago\. ", line)
    assert 3.0 < seconds < 3.0 + SOON_S


@pytest.mark.parametrize("executor", thinned(["threads", "serial"], quick=[], slow=[0]))
def test_rank_whose_model_blocks_leaves_its_stacks_and_the_run_says_who_hung_where(tmp_path, executor):
    stderr, folder = tmp_path / "stderr", tmp_path / "run"
    arguments = ({"executor": executor}, 5, folder, str(stderr))
    with started(rank_jobs.hang_in_the_model, 2, *arguments, timeout_s=3.0) as (first, second):
        assert answer_of(*first) == 1
        assert second[0].is_alive()
    summary = read_summary(folder)
    assert (summary["status"], summary["stop_reason"]) == ("failed", "rank_hangs")
    (hanging,) = summary["hanging_ranks"]
    assert (hanging["rank"], hanging["host"]) == (1, socket.gethostname())
    assert str(hanging["pid"]) == Path(f"{stderr}.pid.1").read_text()
    assert re.fullmatch(r"learning\([01]\) of round [45]", hanging["doing"])  # round 4 may be in flight
    assert re.search(r"called by block_for_ever, \S+rank_jobs\.py:\d+$", hanging["function"])
    assert abs(time.time() - datetime.fromisoformat(hanging["since"]).timestamp()) < 60
    (said,) = [line for line in (folder / "console.log").read_text().splitlines() if line.startswith("error:")]
    assert said in Path(f"{stderr}.0").read_text()
    assert f"which appears to hang in {hanging['function']}: its last task was {hanging['doing']}" in said
    assert "(hang_rank1.txt has its stacks)" in said
    stacks = [(folder / f"hang_rank{rank}.txt").read_text() for rank in range(2)]
    assert "in block_for_ever" in stacks[1] and "waits for other ranks: no" in stacks[1]
    assert "in all_reduce" in stacks[0] and "waits for other ranks: for " in stacks[0]


@pytest.mark.slow
def test_rank_ends_with_all_records_when_that_of_nccl_blocks_every_thread(tmp_path):
    with started(rank_jobs.hang_beside_a_device_that_does_not_answer, 2, tmp_path, timeout_s=1.0) as (first, second):
        assert answer_of(*first) == 1
        assert second[0].is_alive()
    said = (tmp_path / "recorded").read_text()
    assert re.match(r"rank 0 has waited for \d s .* for rank 1 \(.* \(hang_rank1\.txt has its stacks\)\. ", said)
    assert (tmp_path / "stderr.0").read_text() == f"error: {said}\n"


@pytest.mark.slow
def test_run_goes_on_when_a_rank_was_late_beyond_the_timeout_while_others_write_their_stacks(tmp_path):
    folder = tmp_path / "run"
    assert on_ranks(rank_jobs.be_late, 2, folder, timeout_s=1.0) == [("finished", False)] * 2
    assert read_summary(folder)["status"] == "finished"
    assert {"hang_rank0.txt", "hang_rank1.txt"} <= {path.name for path in folder.iterdir()}  # they had asked
