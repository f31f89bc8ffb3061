"""The overhead of figures of ranks and of loggers: shares worked out by hand, and what is counted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from crossbow_py.core.host import usable_core_ids
from crossbow_py.telemetry.events import Listener, Progress
from crossbow_py.telemetry.loggers.tracker import Courier, Point
from experiments.bench.windows import spread
from experiments.overhead import loggers, ranks, report
from experiments.overhead.loggers import Cost, WatchedLogger
from experiments.overhead.ranks import CASES, act_out
from experiments.overhead.side_by_side import ratio_of, run_pair
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


def test_share_of_a_logger_is_the_loops_time_and_what_the_rest_takes_of_its_core() -> None:
    cost = Cost(start_s=2.0, end_s=1.0, loop_s=0.1, courier_s=0.2, service_s=0.1, trained_s=100.0)
    found = loggers.figures([cost], [0.99, 1.01], dropped=3)
    assert found["share"]["median"] == cost.share == pytest.approx(0.004)
    assert (found["loop_share"]["median"], found["processor_share"]["median"]) == (0.001, 0.003)
    assert (found["n"], found["pairs"], found["dropped"]) == (1, 2, 3)
    alike = {"throughput_ratio": spread([1.001]), "pairs": 1, "dropped": 0}
    result = {"kind": "loggers", "loggers": {"mlflow": found}, "alike": alike, "left_out": ["wandb"]}
    assert loggers.headline(result) == (
        "mlflow takes 0.40% of training on one core (at most 0.5% was wanted: reached) and 2.0 s at the start. "
        "Runs with it had 1.000 (0.990–1.010) times the images/s of runs without that went on beside them (n=2). "
        "Of two runs without, one had 1.001 (1.001–1.001) times the images/s of the other (n=1). "
        "wandb is not installed."
    )


def test_two_runs_are_compared_while_both_train() -> None:
    own = [(10.0, 0), (11.0, 50), (13.0, 450), (15.0, 850)]
    base = [(9.0, 0), (12.0, 100), (14.0, 500), (20.0, 9000)]
    # From 11 s, a second after the later of the two has begun, to 15 s, when the first of them ends. The second is at
    # 100 x 2 / 3 then, and at 500 + 8500 / 6.
    expected = (850 - 50) / (500 + 8500 / 6 - 200 / 3)
    assert ratio_of(own, base, settling_s=1.0) == pytest.approx(expected)
    assert ratio_of(own, [(14.5, 0), (16.0, 10)], settling_s=1.0) is None
    assert ratio_of(own, [], settling_s=1.0) is None


def burn(marks: Listener) -> list[int]:
    """A side that tells of what it has done, as fast as its core lets it."""
    end_s, done = time.monotonic() + 1.5, 0
    while time.monotonic() < end_s:
        sum(range(10_000))
        done += 1
        marks.on_progress(replace(progress(1.0), samples_seen=done))
    return sorted(usable_core_ids())


@pytest.mark.skipif(len(usable_core_ids()) < 2, reason="two runs side by side need two cores")
def test_two_runs_go_on_at_once_on_a_core_each_and_swap() -> None:
    first, second, *_ = sorted(usable_core_ids())
    for is_swapped, cores in ((False, ([first], [second])), (True, ([second], [first]))):
        pair = run_pair(burn, burn, is_swapped)
        assert pair.answers == cores
        assert pair.ratio is None or pair.ratio > 0


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
