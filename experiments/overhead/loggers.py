"""What do MLflow and Weights & Biases cost a run beside TensorBoard?

    python experiments/overhead/loggers.py [--repetitions 5 --seconds 60] [--json PATH]

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
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import foreign_share
from crossbow_py.telemetry.events import Progress, RunInfo, Summary
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowTracker
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import Tracker
from crossbow_py.telemetry.loggers.wandb_logger import WandbTracker
from experiments.bench.machine import usable_cores
from experiments.bench.results import count, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE, load_with_ended, spread
from experiments.overhead.run import train
from experiments.tables.markdown import NONE, markdown_table, spread_text
from experiments.tables.measuring import measure_and_write

Result = Mapping[str, Any]
KIND, MOST_SHARE, NETWORK = "loggers", 0.005, "lenet"
TRACKERS: Mapping[str, Callable[[], Tracker]] = {"mlflow": MLflowTracker, "wandb": WandbTracker}
_OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
_TICKS_S = os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=5, help="pairs of runs for each logger (default %(default)s)")
    add("--seconds", type=positive, default=60.0, help="of training, each time (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        there = [name for name in TRACKERS if importlib.util.find_spec(name)]
        if not there:
            raise UserError("neither mlflow nor wandb is installed; run pip install 'crossbow_py[mlflow,wandb]'.")
        with patch.dict(os.environ, _OFFLINE):
            measured = {name: measure_logger(name, given.repetitions, given.seconds) for name in there}
        return {
            "kind": KIND, "network": NETWORK, "seconds": given.seconds, "loggers": measured,
            "left_out": [name for name in TRACKERS if name not in there],
        }  # fmt: skip

    return measure_and_write(parser, argv, measure, result_text)


def measure_logger(name: str, repetitions: int, seconds: float) -> dict[str, Any]:
    """Runs with TensorBoard and the logger, and with TensorBoard alone, by turns.

    Of a first pair only the start counts, in which the package is imported. Of others the ratio is dropped where
    other programs were busy; what the logger itself takes is not.
    """
    costs, ratios, dropped, first_start_s = list[Cost](), list[float](), 0, 0.0
    for repetition in range(repetitions + 1):
        rates: dict[bool, float] = {}
        before = load_with_ended()
        for logged in (True, False) if repetition % 2 else (False, True):
            cost = Cost()
            callbacks = [WatchedLogger(TRACKERS[name](), cost)] if logged else []
            with tempfile.TemporaryDirectory() as folder:
                summary = train(NETWORK, Path(folder) / "run", seconds, callbacks)
            rates[logged] = summary.images_per_s
            if logged and repetition:
                costs.append(cost)
            elif logged:
                first_start_s = cost.start_s
        if not repetition:
            continue
        share = foreign_share(before, load_with_ended())
        if share is not None and share > MAX_FOREIGN_SHARE:
            dropped += 1
            continue
        ratios.append(rates[True] / rates[False])
    return {"first_start_s": round(first_start_s, 3), **figures(costs, ratios, dropped, usable_cores())}


@dataclass
class Cost:
    """What a logger took of a run, in seconds.

    Attributes:
        start_s, end_s: of the clock, while the run begins and ends.
        loop_s: of the training loop's thread, in between.
        courier_s, service_s: of the processor, by the thread that sends and by processes that the package has started,
            from the first progress to the last.
        trained_s: of training, from the first progress to the last.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    loop_s: float = 0.0
    courier_s: float = 0.0
    service_s: float = 0.0
    trained_s: float = 0.0

    def share(self, cores: int) -> float:
        """The share of training: the loop's time, and the processor's time of the rest as a part of all cores."""
        return (self.loop_s + (self.courier_s + self.service_s) / cores) / self.trained_s


def figures(costs: Sequence[Cost], ratios: Sequence[float], dropped: int, cores: int) -> dict[str, Any]:
    """The figures of a logger as plain values."""
    trained = [cost for cost in costs if cost.trained_s > 0]
    return {
        "n": len(costs),
        "share": spread([cost.share(cores) for cost in trained], 6),
        "loop_share": spread([cost.loop_s / cost.trained_s for cost in trained], 6),
        "processor_share": spread([(cost.courier_s + cost.service_s) / cost.trained_s / cores for cost in trained], 6),
        "start_s": spread([cost.start_s for cost in costs], 3),
        "end_s": spread([cost.end_s for cost in costs], 3),
        "throughput_ratio": spread(ratios),
        "pairs": len(ratios),
        "dropped": dropped,
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
        now = progress.elapsed_s, self._courier_s(), processes_s()
        self._first = self._first or now
        cost, since = self._cost, [last - first for first, last in zip(self._first, now, strict=True)]
        cost.trained_s, cost.courier_s, cost.service_s = since

    def on_end(self, summary: Summary) -> None:
        begun_s = time.perf_counter()
        super().on_end(summary)
        self._cost.end_s += time.perf_counter() - begun_s

    def _courier_s(self) -> float:
        """The processor's seconds of the thread that sends."""
        if self._courier is None or self._courier._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._courier._thread.ident))


def processes_s() -> float:
    """The processor's seconds of this process's children that run, such as the one that Weights & Biases starts."""
    ticks = 0
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / _TICKS_S


def headline(result: Result) -> str:
    said = []
    for name, own in result["loggers"].items():
        if own["share"] is not None:
            verdict = "reached" if own["share"]["median"] <= MOST_SHARE else "missed"
            said.append(
                f"{name} takes {own['share']['median']:.2%} of training (at most {MOST_SHARE:.1%} was wanted: "
                f"{verdict}) and {own['first_start_s']:.1f} s at the start."
            )
            if own["pairs"]:
                ratio = spread_text(own["throughput_ratio"], ".3f")
                said.append(f"Runs with it had {ratio} times the images/s of runs without (n={own['pairs']}).")
    return " ".join([*said, *(f"{name} is not installed." for name in result["left_out"])])


def answer(results: Mapping[str, Result]) -> str:
    """The headline; nothing before it is measured."""
    return "\n\n".join(headline(result) for result in results.values() if result.get("kind") == KIND)


def result_text(result: Result) -> str:
    header = [
        "", "share of training", "of the loop", "of the processor", "first start, s", "later starts, s", "end, s", "n",
        "images/s with ÷ without", "pairs", "dropped",
    ]  # fmt: skip
    rows = [
        [
            name,
            *(spread_text(own[part], ".2%") for part in ("share", "loop_share", "processor_share")),
            f"{own['first_start_s']:.1f}",
            *(spread_text(own[part], ".1f") for part in ("start_s", "end_s")),
            str(own["n"]),
            spread_text(own["throughput_ratio"], ".3f") if own["pairs"] else NONE,
            str(own["pairs"]),
            str(own["dropped"]),
        ]
        for name, own in result["loggers"].items()
    ]
    head = f"{result['network']}, runs of {result['seconds']:g} s."
    return f"{headline(result)}\n\n{head}\n\n{markdown_table(header, rows)}"


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
