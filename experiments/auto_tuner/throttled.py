"""Does a run with num_learners=auto let go of learners while a neighbour burns a core, and take them back after?

    python experiments/auto_tuner/throttled.py

Trains LeNet on MNIST under `executor=threads`. Once the auto-tuner has settled, a process starts that does nothing but
count, on one core and at the highest priority the user may give it: a neighbour that leaves the core to nobody. (With
ordinary priority the learners get a share of that core as well, and it pays to keep them.) Later it is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py import SGD, Listener, Trainer
from crossbow_py.core.host import usable_core_ids
from crossbow_py.data.datasets import as_pair
from crossbow_py.models import MODELS
from crossbow_py.telemetry.events import LearnerCount, Progress
from experiments.auto_tuner.report import phases
from experiments.bench.machine import machine
from experiments.bench.program import draw_after, positive
from experiments.bench.results import results_folder, write_result
from experiments.bench.workloads import load_source

EXPERIMENT = "auto_tuner"
_MODEL, _BATCH_SIZE, MAX_LEARNERS = "lenet", 16, 4
_BURN = "while True: pass"
_PRIORITY = -20


class Course(Listener):
    """Throughput and decisions of a run, by the seconds since it began to train."""

    def __init__(self) -> None:
        self.throughput: list[tuple[float, float, int]] = []  # seconds, images/s, learners
        self.decisions: list[dict[str, Any]] = []
        self._last: tuple[float, int] | None = None

    def on_progress(self, progress: Progress) -> None:
        seconds, seen = progress.elapsed_s, progress.samples_seen
        if self._last is not None and seconds > self._last[0]:
            rate = (seen - self._last[1]) / (seconds - self._last[0])
            self.throughput.append((round(seconds, 2), round(rate, 1), progress.num_learners))
        self._last = (seconds, seen)

    def on_learner_count(self, change: LearnerCount) -> None:
        self.decisions.append(asdict(change))
        print(f"{change.elapsed_s:7.1f} s  auto-tuner: {change.reason}", flush=True)


class Neighbour:
    """A process that burns a core for a while, at times counted from when the run began to train."""

    def __init__(self, core: int, begins_s: float, ends_s: float) -> None:
        self._core, self._begins_s, self._ends_s = core, begins_s, ends_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")
        self.priority = 0

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._over.wait(self._begins_s):
            return
        process = subprocess.Popen([sys.executable, "-c", _BURN])
        try:
            os.sched_setaffinity(process.pid, {self._core})
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _PRIORITY)
            self.priority = os.getpriority(os.PRIO_PROCESS, process.pid)
            print(f"a neighbour burns core {self._core} (priority {self.priority})", flush=True)
            self._over.wait(self._ends_s - self._begins_s)
        finally:
            process.kill()
            process.wait()
            print("the neighbour is gone", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, throttle, and write the result and its picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quiet-s", type=positive, default=25.0, help="seconds before the neighbour (default 25)")
    parser.add_argument("--busy-s", type=positive, default=30.0, help="seconds with the neighbour (default 30)")
    parser.add_argument("--after-s", type=positive, default=60.0, help="seconds after the neighbour (default 60)")
    parser.add_argument("--results", type=Path, default=results_folder(EXPERIMENT), help="default: results/ here")
    options = parser.parse_args(argv)
    facts, course, source = machine(), Course(), load_source(_MODEL)
    begins_s, ends_s = options.quiet_s, options.quiet_s + options.busy_s
    pair = as_pair(source.train)
    assert pair is not None, "published data sets are pairs of tensors"
    images = pair[0]
    trainer = Trainer(
        model=lambda: MODELS[_MODEL]().build(tuple(images.shape[1:]), source.num_classes or 0),
        train_data=source.train,
        num_classes=source.num_classes,
        optimizer=SGD(learning_rate=0.01, momentum=0.9),
        mean=source.mean,
        std=source.std,
        callbacks=[course],
        batch_size=_BATCH_SIZE,
        num_learners="auto",
        max_learners=MAX_LEARNERS,
        executor="threads",
        device="cpu",
    )
    with Neighbour(max(usable_core_ids()), begins_s, ends_s) as neighbour:
        trainer.fit(max_time_s=ends_s + options.after_s)
    result = {
        "machine": facts,
        "model": _MODEL,
        "batch_size": _BATCH_SIZE,
        "neighbour": {"begins_s": begins_s, "ends_s": ends_s, "priority": neighbour.priority},
        "throughput": course.throughput,
        "decisions": course.decisions,
    }
    write_result(options.results / "throttled.json", result)
    draw_after("auto_tuner", options.results / "throttled.json")
    for phase in phases(result):
        print(phase)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
