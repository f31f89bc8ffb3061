"""The overhead of figures of ranks and of loggers: shares worked out by hand, and what is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import usable_core_ids
from crossbow_py.telemetry.events import Listener, Progress, Summary
from crossbow_py.telemetry.loggers.tracker import Courier, Point
from experiments.bench.windows import spread
from experiments.overhead import loggers, ranks, report
from experiments.overhead.loggers import Cost, WatchedLogger
from experiments.overhead.ranks import CASES, act_out
from experiments.overhead.run import train
from experiments.overhead.side_by_side import Couple, ratio_of, run_couple
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
    busy, unknown = Couple((1.0, 1.0), (cost, cost), 0.06), Couple((None, 1.0), (cost, cost), 0.0)
    # One core is 5 % faster than the other, and a logger costs nothing.
    found = loggers.figures([Couple((1.05, 1 / 1.05), (cost, cost), 0.04), busy, unknown])
    assert found["share"]["median"] == cost.share == pytest.approx(0.004)
    assert (found["loop_share"]["median"], found["processor_share"]["median"]) == (0.001, 0.003)
    assert (found["n"], found["couples"], found["dropped"]) == (6, 1, 2)
    alike = loggers.ratios_of([Couple((1.002, 1.002), (None, None), None)])
    result = {"kind": "loggers", "loggers": {"mlflow": found}, "alike": alike, "left_out": ["wandb"]}
    assert loggers.headline(result) == (
        "mlflow takes 0.40% of training on one core (at most 0.5% was wanted: reached) and 2.0 s at the start. "
        "Runs with it had 1.000 (1.000–1.000) times the images/s of runs without that went on beside them (n=1). "
        "Of two runs without, one had 1.002 (1.002–1.002) times the images/s of the other (n=1). "
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


def burn(seconds: float, marks: Listener) -> list[int]:
    """A side that tells of what it has done, as fast as its core lets it."""
    end_s, done = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        sum(range(10_000))
        done += 1
        marks.on_progress(replace(progress(1.0), samples_seen=done))
    return sorted(usable_core_ids())


def fail(marks: Listener) -> None:
    raise SystemExit(3)


@pytest.mark.skipif(len(usable_core_ids()) < 2, reason="two runs side by side need two cores")
@pytest.mark.slow
def test_two_runs_go_on_at_once_on_a_core_each_and_then_on_the_others() -> None:
    first, second, *_ = sorted(usable_core_ids())
    couple = run_couple(partial(burn, 6.0), partial(burn, 6.0))
    assert couple.answers == ([first], [second])
    assert all(couple.ratios)  # of a time in which both went on, which there would not be one after the other


@pytest.mark.skipif(len(usable_core_ids()) < 2, reason="two runs side by side need two cores")
@pytest.mark.slow
def test_side_that_fails_ends_the_other() -> None:
    begun_s = time.monotonic()
    with pytest.raises(UserError, match="^a run failed"):
        run_couple(fail, partial(burn, 300.0))
    assert time.monotonic() - begun_s < 100


def ended(train_time_s: float) -> Summary:
    """How a run ends after so long."""
    return replace(train("mlp", None, 0.05), train_time_s=train_time_s)


def test_cost_of_a_logger_is_counted_from_the_first_progress_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5.0, 7.0])
    monkeypatch.setattr(loggers, "descendants_s", lambda _: next(used))
    cost = Cost()
    logger = WatchedLogger(MemoryTracker(), cost)
    for elapsed_s in (10.0, 11.0, 12.0):
        logger.on_progress(progress(elapsed_s))
    logger.on_end(ended(14.0))
    assert (cost.trained_s, cost.service_s, cost.courier_s) == (4.0, 2.0, 0.0)
    assert cost.loop_s > 0


def test_time_of_the_thread_that_sends_is_counted() -> None:
    class Busy(MemoryTracker):
        def log(self, points: Sequence[Point]) -> None:
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s:
                pass
            super().log(points)

    cost, tracker = Cost(), Busy()
    logger = WatchedLogger(tracker, cost)
    logger._courier = Courier(tracker, every_s=0.01)
    logger.on_progress(progress(1.0))
    end_s = time.monotonic() + 30
    while not tracker.points:
        assert time.monotonic() < end_s, "nothing was sent"
        time.sleep(0.01)
    logger.on_end(ended(2.0))
    assert cost.courier_s >= 0.09


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")
def test_time_of_a_child_and_of_its_child_is_known() -> None:
    work = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-S", "-c", work], start_new_session=True)
    try:
        end_s, before_s = time.monotonic() + 30, loggers.descendants_s(os.getpid())
        while loggers.descendants_s(os.getpid()) - before_s < 0.5:
            assert time.monotonic() < end_s, "a busy child took no time"
            time.sleep(0.02)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
