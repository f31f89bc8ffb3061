"""Does a run with num_learners=auto let go of learners while a neighbour burns a core, and take them back after?

    python experiments/auto_tuner/run.py [--json PATH]

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py import SGD, Listener, Trainer
from crossbow_py.core.host import usable_core_ids
from crossbow_py.data.datasets import as_pair
from crossbow_py.models import MODELS
from crossbow_py.telemetry.events import LearnerCount, Progress
from experiments.bench.program import measure_and_write, measuring_parser, positive
from experiments.bench.workloads import load_source
from experiments.tables.markdown import columns_table, number_of

Result = Mapping[str, Any]
_MODEL, _BATCH_SIZE, MAX_LEARNERS = "lenet", 16, 4
_BURN = "while True: pass"
_PRIORITY = -20
_SETTLING_S = 5.0  # at the end of a phase, when it has had the time to settle


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
    parser = measuring_parser(__doc__, written="write the results there, and draw them beside it")
    add = parser.add_argument
    add("--quiet-s", type=positive, default=25.0, help="seconds before the neighbour (default %(default)s)")
    add("--busy-s", type=positive, default=30.0, help="seconds with the neighbour (default %(default)s)")
    add("--after-s", type=positive, default=60.0, help="seconds after the neighbour (default %(default)s)")
    return measure_and_write(parser, argv, throttle, result_text, "auto_tuner")


def throttle(given: argparse.Namespace) -> dict[str, Any]:
    """Train beside a neighbour that comes and goes."""
    course, source = Course(), load_source(_MODEL)
    begins_s, ends_s = given.quiet_s, given.quiet_s + given.busy_s
    pair = as_pair(source.train)
    assert pair is not None, "published data sets are pairs of tensors"
    shape = tuple(pair[0].shape[1:])
    trainer = Trainer(
        model=lambda: MODELS[_MODEL]().build(shape, source.num_classes or 0), train_data=source.train,
        num_classes=source.num_classes, optimizer=SGD(learning_rate=0.01, momentum=0.9), mean=source.mean,
        std=source.std, callbacks=[course], batch_size=_BATCH_SIZE, num_learners="auto", max_learners=MAX_LEARNERS,
        executor="threads", device="cpu",
    )  # fmt: skip
    with Neighbour(max(usable_core_ids()), begins_s, ends_s) as neighbour:
        trainer.fit(max_time_s=ends_s + given.after_s)
    return {
        "model": _MODEL,
        "batch_size": _BATCH_SIZE,
        "neighbour": {"begins_s": begins_s, "ends_s": ends_s, "priority": neighbour.priority},
        "throughput": course.throughput,
        "decisions": course.decisions,
    }


def phases(result: Result) -> list[dict[str, Any]]:
    """Before, with and after the neighbour: the learners at the end of each, and the throughput of its last seconds.

    None where nothing was told in these, as on a machine that has hardly any time for the run.
    """
    begins_s, ends_s = result["neighbour"]["begins_s"], result["neighbour"]["ends_s"]
    last_s = result["throughput"][-1][0]
    found = []
    for name, first_s, end_s in (("before", 0.0, begins_s), ("with", begins_s, ends_s), ("after", ends_s, last_s)):
        late = [point for point in result["throughput"] if max(first_s, end_s - _SETTLING_S) <= point[0] <= end_s]
        decisions = [one for one in result["decisions"] if first_s <= one["elapsed_s"] < end_s]
        found.append({
            "phase": f"{name} the neighbour",
            "seconds": end_s - first_s,
            "decisions": len(decisions),
            "num_learners": late[-1][2] if late else None,
            "images_per_s": median(point[1] for point in late) if late else None,
        })  # fmt: skip
    return found


def phases_table(result: Result) -> str:
    return columns_table(phases(result), {
        "": "phase", "seconds": number_of("seconds"), "decisions": "decisions",
        "learners at its end": number_of("num_learners", "d"),
        "images/s of its last 5 s": number_of("images_per_s"),
    })  # fmt: skip


def decisions_list(result: Result) -> str:
    return "\n".join(f"- {one['elapsed_s']:.1f} s: {one['reason']}" for one in result["decisions"])


def result_text(result: Result) -> str:
    return f"{phases_table(result)}\n\n{decisions_list(result)}"


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
