"""What do MLflow and Weights & Biases cost a run beside TensorBoard?

    python experiments/overhead/loggers.py [--repetitions 4 --seconds 40] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.events import Listener, Progress, RunInfo, Summary
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowTracker
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import Tracker
from crossbow_py.telemetry.loggers.wandb_logger import WandbTracker
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import spread
from experiments.overhead.run import train
from experiments.overhead.side_by_side import Couple, run_couple
from experiments.tables.markdown import NONE, markdown_table, spread_text

Result = Mapping[str, Any]
KIND, MOST_SHARE, NETWORK = "loggers", 0.005, "lenet"
TRACKERS: Mapping[str, Callable[[], Tracker]] = {"mlflow": MLflowTracker, "wandb": WandbTracker}
_OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
_TICKS_S = os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=4, help="couples of pairs of runs for each logger (default %(default)s)")
    add("--seconds", type=positive, default=40.0, help="of training, each time (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        there = [name for name in TRACKERS if importlib.util.find_spec(name)]
        if not there:
            raise UserError("neither mlflow nor wandb is installed; run pip install 'crossbow_py[mlflow,wandb]'.")
        with patch.dict(os.environ, _OFFLINE):
            return {
                "kind": KIND, "network": NETWORK, "seconds": given.seconds,
                **measure_loggers(there, given.repetitions, given.seconds),
                "left_out": [name for name in TRACKERS if name not in there],
            }  # fmt: skip

    return measure_and_write(parser, argv, measure, result_text)


def measure_loggers(names: Sequence[str], repetitions: int, seconds: float) -> dict[str, Any]:
    """Runs with TensorBoard and a logger beside runs with TensorBoard alone; and of those beside their like."""
    plain = partial(train_logged, None, seconds)
    couples: dict[str | None, list[Couple]] = {name: [] for name in (*names, None)}
    for _ in range(repetitions):
        for name, own in couples.items():
            own.append(run_couple(partial(train_logged, name, seconds), plain))
    return {"loggers": {name: figures(couples[name]) for name in names}, "alike": ratios_of(couples[None])}


def train_logged(name: str | None, seconds: float, marks: Listener) -> Cost:
    """Train with TensorBoard and, if one is named, a logger; what that took."""
    cost = Cost()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"  # of this process, which ends
        callbacks = [marks, *([] if name is None else [WatchedLogger(TRACKERS[name](), cost)])]
        train(NETWORK, Path(folder) / "run", seconds, callbacks, num_learners=1)
    return cost


@dataclass
class Cost:
    """What a logger took of a run, in seconds.

    Attributes:
        start_s, end_s: of the clock, while the run begins and ends.
        loop_s: of the training loop's thread, in between.
        courier_s, service_s: of the processor, by the thread that sends and by processes that the package has started,
            from the first progress to the end.
        trained_s: of training, from the first progress to the end.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    loop_s: float = 0.0
    courier_s: float = 0.0
    service_s: float = 0.0
    trained_s: float = 0.0

    @property
    def share(self) -> float:
        """The share of training on one core: the loop's time, and the processor's time of the rest."""
        return (self.loop_s + self.courier_s + self.service_s) / self.trained_s


def figures(couples: Sequence[Couple]) -> dict[str, Any]:
    """The figures of a logger as plain values."""
    costs = [cost for couple in couples for cost in couple.answers]
    trained = [cost for cost in costs if cost.trained_s > 0]
    return {
        "n": len(costs),
        "share": spread([cost.share for cost in trained], 6),
        "loop_share": spread([cost.loop_s / cost.trained_s for cost in trained], 6),
        "processor_share": spread([(cost.courier_s + cost.service_s) / cost.trained_s for cost in trained], 6),
        "start_s": spread([cost.start_s for cost in costs], 3),
        "end_s": spread([cost.end_s for cost in costs], 3),
        **ratios_of(couples),
    }


def ratios_of(couples: Sequence[Couple]) -> dict[str, Any]:
    """Ratios of images/s, and those of every couple and what others took meanwhile."""
    ratios = [couple.ratio for couple in couples if couple.ratio is not None]
    return {
        "throughput_ratio": spread(ratios),
        "couples": len(ratios),
        "dropped": len(couples) - len(ratios),
        "pairs": [[*couple.ratios, couple.foreign_share] for couple in couples],
    }


class WatchedLogger(RunLogger):
    """A run's logger that counts what it takes of the run."""

    def __init__(self, tracker: Tracker, cost: Cost) -> None:
        super().__init__(tracker)
        self._cost = cost
        self._first: tuple[float, float, float] | None = None

    def on_start(self, info: RunInfo) -> None:
        begun_s = time.perf_counter()
        super().on_start(info)
        self._cost.start_s += time.perf_counter() - begun_s

    def on_progress(self, progress: Progress) -> None:
        begun_s = time.perf_counter()
        super().on_progress(progress)
        self._cost.loop_s += time.perf_counter() - begun_s
        # Not each time: reading what others have used takes longer than the logger.
        self._first = self._first or self._used(progress.elapsed_s)

    def on_end(self, summary: Summary) -> None:
        cost = self._cost
        if self._first is not None:
            used = self._used(summary.train_time_s)
            cost.trained_s, cost.courier_s, cost.service_s = (
                last - first for first, last in zip(self._first, used, strict=True)
            )
        begun_s = time.perf_counter()
        super().on_end(summary)
        cost.end_s += time.perf_counter() - begun_s

    def _used(self, elapsed_s: float) -> tuple[float, float, float]:
        """Seconds of training, and the processor's of the thread that sends and of what the package has started."""
        sends = None if self._courier is None else self._courier._thread.ident
        courier_s = 0.0 if sends is None else time.clock_gettime(time.pthread_getcpuclockid(sends))
        return elapsed_s, courier_s, descendants_s(os.getpid())


def descendants_s(process: int) -> float:
    """The processor's seconds of the processes that a process has started, and they have, as far as they run."""
    children: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS_S  # user and system
            children.setdefault(int(fields[1]), []).append((int(path.parent.name), seconds))
    found, parents = 0.0, [process]
    while parents:
        for child, seconds in children.get(parents.pop(), ()):
            found += seconds
            parents.append(child)
    return found


def headline(result: Result) -> str:
    said = []
    for name, own in result["loggers"].items():
        if own["share"] is not None:
            verdict = "reached" if own["share"]["median"] <= MOST_SHARE else "missed"
            said.append(
                f"{name} takes {own['share']['median']:.2%} of training on one core (at most {MOST_SHARE:.1%} was "
                f"wanted: {verdict}) and {own['start_s']['median']:.1f} s at the start."
            )
            if own["couples"]:
                said.append(
                    f"Runs with it had {spread_text(own['throughput_ratio'], '.3f')} times the images/s of runs "
                    f"without that went on beside them (n={own['couples']})."
                )
    if (alike := result["alike"])["couples"]:
        ratio = spread_text(alike["throughput_ratio"], ".3f")
        said.append(f"Of two runs without, one had {ratio} times the images/s of the other (n={alike['couples']}).")
    return " ".join([*said, *(f"{name} is not installed." for name in result["left_out"])])


def result_text(result: Result) -> str:
    header = [
        "", "share of training", "of the loop", "of the processor", "start, s", "end, s", "n",
        "images/s with ÷ without", "couples", "dropped",
    ]  # fmt: skip
    rows = [
        [
            name,
            *(spread_text(own[part], ".2%") for part in ("share", "loop_share", "processor_share")),
            *(spread_text(own[part], ".1f") for part in ("start_s", "end_s")),
            str(own["n"]),
            *_of_couples(own),
        ]
        for name, own in result["loggers"].items()
    ]
    rows.append(["neither", *[NONE] * 6, *_of_couples(result["alike"])])
    head = f"{result['network']}, runs of {result['seconds']:g} s, one learner on one core each, two at a time."
    return f"{headline(result)}\n\n{head}\n\n{markdown_table(header, rows)}"


def _of_couples(own: Mapping[str, Any]) -> list[str]:
    ratio = spread_text(own["throughput_ratio"], ".3f") if own["couples"] else NONE
    return [ratio, str(own["couples"]), str(own["dropped"])]


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
