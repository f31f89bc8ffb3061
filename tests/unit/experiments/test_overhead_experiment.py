"""The overhead of figures of ranks and of loggers: shares worked out by hand, and what is counted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from crossbow_py.telemetry.events import Listener, Progress
from crossbow_py.telemetry.loggers.tracker import Courier, Point
from experiments.bench.windows import spread
from experiments.overhead import loggers, ranks, report
from experiments.overhead.loggers import Cost, WatchedLogger
from experiments.overhead.ranks import CASES, act_out
from tests.trackers import MemoryTracker


def progress(elapsed_s: float) -> Progress:
    return Progress(
        samples_seen=64, epoch=0.1, train_loss=1.0, images_per_s=100.0, learning_rate=0.1, num_learners=2,
        elapsed_s=elapsed_s,
    )  # fmt: skip


def test_ranks_that_are_acted_out_have_the_pace_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []

    class Kept(Listener):
        def on_progress(self, progress: Progress) -> None:
            told.append(progress)

    monkeypatch.setattr(ranks, "file_listeners", lambda *_: [Kept()])
    act_out(CASES[0], 1.0, with_ranks=True)
    # Rounds of 50 ms, of which rank 0 waits a tenth, rank 1 a twentieth, and rank 7 an eightieth.
    steps = {each.rank: each.step_ms for each in told[-1].ranks}
    assert [steps[rank] for rank in (0, 1, 7)] == pytest.approx([45.0, 47.5, 49.375])
    assert told[-1].gpus["gpus/utilization_percent/mean"] == 95.0  # 760 / 8
    act_out(CASES[0], 1.0, with_ranks=False)
    assert told[-1].ranks == ()


@pytest.mark.parametrize(("share", "said"), [(0.005, "0.50%, reached"), (0.0051, "0.51%, missed")])
def test_goal_of_ranks_holds_for_the_worst_case_of_eight(share: float, said: str) -> None:
    cases = [
        {"num_ranks": 8, "seconds": 600.0, "share": spread([0.001])},
        {"num_ranks": 8, "seconds": 60.0, "share": spread([share])},
        {"num_ranks": 8, "seconds": 600.0, "share": spread([0.001])},
        {"num_ranks": 64, "seconds": 60.0, "share": spread([0.01, 0.02, 0.04])},
    ]
    found: dict[str, Any] = {"kind": "ranks", "cases": cases}
    shown, verdict = said.split(", ")
    assert ranks.headline(found) == (
        f"Figures of 8 ranks take rank 0 {shown} ({shown}–{shown}) of 60 s of training where they take the most (at "
        f"most 0.5% was wanted: {verdict}). Figures of 64 ranks take rank 0 2.00% (1.00%–4.00%) of 60 s of training "
        "where they take the most."
    )
    assert report.TABLES_OVER_ALL["of_ranks"]({"overhead": {}}) == ""


def test_share_of_a_logger_is_the_loops_time_and_its_part_of_the_cores() -> None:
    cost = Cost(start_s=2.0, end_s=1.0, loop_s=0.1, courier_s=0.3, service_s=0.1, trained_s=100.0)
    assert cost.share(cores=2) == pytest.approx(0.003)  # 0.1 + 0.4 / 2 of 100
    found = loggers.figures([cost], [0.99, 1.01], dropped=3, cores=2)
    assert found["share"]["median"] == 0.003
    assert (found["loop_share"]["median"], found["processor_share"]["median"]) == (0.001, 0.002)
    assert (found["n"], found["pairs"], found["dropped"]) == (1, 2, 3)
    assert found["throughput_ratio"] == {"median": 1.0, "minimum": 0.99, "maximum": 1.01}
    result = {"kind": "loggers", "loggers": {"mlflow": {**found, "first_start_s": 4.9}}, "left_out": ["wandb"]}
    assert loggers.headline(result) == (
        "mlflow takes 0.30% of training (at most 0.5% was wanted: reached) and 4.9 s at the start. "
        "Runs with it had 1.000 (0.990–1.010) times the images/s of runs without (n=2). wandb is not installed."
    )


def test_cost_of_a_logger_is_counted_between_the_first_progress_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5.0, 5.5, 7.0])
    monkeypatch.setattr(loggers, "processes_s", lambda: next(used))
    cost = Cost()
    logger = WatchedLogger(MemoryTracker(), cost)
    for elapsed_s in (10.0, 11.0, 14.0):
        logger.on_progress(progress(elapsed_s))
    assert (cost.trained_s, cost.service_s, cost.courier_s) == (4.0, 2.0, 0.0)
    assert cost.loop_s > 0


def test_time_of_the_thread_that_sends_is_counted() -> None:
    class Busy(MemoryTracker):
        def log(self, points: Sequence[Point]) -> None:
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s:
                pass

    cost = Cost()
    logger = WatchedLogger(Busy(), cost)
    logger._courier = Courier(logger._tracker, every_s=0.01)
    logger.on_progress(progress(1.0))
    end_s = time.monotonic() + 30
    while cost.courier_s < 0.1:
        assert time.monotonic() < end_s, "a busy courier took no time"
        time.sleep(0.02)
        logger.on_progress(progress(2.0))
    logger.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")
def test_time_of_a_child_that_runs_is_known() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        end_s, before_s = time.monotonic() + 30, loggers.processes_s()
        while loggers.processes_s() - before_s < 0.1:
            assert time.monotonic() < end_s, "a busy child took no time"
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
