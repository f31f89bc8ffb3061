"""What do MLflow and Weights & Biases cost a run beside TensorBoard?

    python experiments/overhead/loggers.py [--repetitions 9 --seconds 45] [--json PATH]

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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.events import Listener, Progress, RunInfo, Summary
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowTracker
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import Tracker
from crossbow_py.telemetry.loggers.wandb_logger import WandbTracker
from experiments.bench.results import count, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE, spread
from experiments.overhead.run import train
from experiments.overhead.side_by_side import run_pair
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
    add("--repetitions", type=count, default=9, help="pairs of runs for each logger (default %(default)s)")
    add("--seconds", type=positive, default=45.0, help="of training, each time (default %(default)s)")

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
    """Runs with TensorBoard and a logger beside runs with TensorBoard alone; and of those beside their like.

    A pair is dropped where other programs were busy; what the logger itself takes is counted all the same.
    """
    plain = partial(train_logged, None, seconds)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    ratios: dict[str | None, list[float]] = {name: [] for name in (*names, None)}
    dropped: dict[str | None, int] = dict.fromkeys(ratios, 0)
    for repetition in range(repetitions):
        for name, own in ratios.items():
            pair = run_pair(partial(train_logged, name, seconds), plain, is_swapped=bool(repetition % 2))
            if name is not None:
                costs[name].append(pair.answers[0])
            if pair.ratio is None or (pair.foreign_share or 0.0) > MAX_FOREIGN_SHARE:
                dropped[name] += 1
            else:
                own.append(pair.ratio)
    return {
        "loggers": {name: figures(costs[name], ratios[name], dropped[name]) for name in names},
        "alike": {"throughput_ratio": spread(ratios[None]), "pairs": len(ratios[None]), "dropped": dropped[None]},
    }


def train_logged(name: str | None, seconds: float, marks: Listener) -> Cost:
    """Train with TensorBoard and, if one is named, a logger; what that took."""
    cost = Cost()
    callbacks = [marks, *([] if name is None else [WatchedLogger(TRACKERS[name](), cost)])]
    with tempfile.TemporaryDirectory() as folder:
        train(NETWORK, Path(folder) / "run", seconds, callbacks, num_learners=1)
    return cost


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

    @property
    def share(self) -> float:
        """The share of training on one core: the loop's time, and the processor's time of the rest."""
        return (self.loop_s + self.courier_s + self.service_s) / self.trained_s


def figures(costs: Sequence[Cost], ratios: Sequence[float], dropped: int) -> dict[str, Any]:
    """The figures of a logger as plain values."""
    trained = [cost for cost in costs if cost.trained_s > 0]
    return {
        "n": len(costs),
        "share": spread([cost.share for cost in trained], 6),
        "loop_share": spread([cost.loop_s / cost.trained_s for cost in trained], 6),
        "processor_share": spread([(cost.courier_s + cost.service_s) / cost.trained_s for cost in trained], 6),
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
                f"{name} takes {own['share']['median']:.2%} of training on one core (at most {MOST_SHARE:.1%} was "
                f"wanted: {verdict}) and {own['start_s']['median']:.1f} s at the start."
            )
            if own["pairs"]:
                said.append(
                    f"Runs with it had {spread_text(own['throughput_ratio'], '.3f')} times the images/s of runs "
                    f"without that went on beside them (n={own['pairs']})."
                )
    if (alike := result["alike"])["pairs"]:
        ratio = spread_text(alike["throughput_ratio"], ".3f")
        said.append(f"Of two runs without, one had {ratio} times the images/s of the other (n={alike['pairs']}).")
    return " ".join([*said, *(f"{name} is not installed." for name in result["left_out"])])


def answer(results: Mapping[str, Result]) -> str:
    """The headline; nothing before it is measured."""
    return "\n\n".join(headline(result) for result in results.values() if result.get("kind") == KIND)


def result_text(result: Result) -> str:
    header = [
        "", "share of training", "of the loop", "of the processor", "start, s", "end, s", "n",
        "images/s with ÷ without", "pairs", "dropped",
    ]  # fmt: skip
    rows = [
        [
            name,
            *(spread_text(own[part], ".2%") for part in ("share", "loop_share", "processor_share")),
            *(spread_text(own[part], ".1f") for part in ("start_s", "end_s")),
            str(own["n"]),
            *_of_pairs(own),
        ]
        for name, own in result["loggers"].items()
    ]
    rows.append(["neither", *[NONE] * 6, *_of_pairs(result["alike"])])
    head = f"{result['network']}, runs of {result['seconds']:g} s, one learner on one core each, two at a time."
    return f"{headline(result)}\n\n{head}\n\n{markdown_table(header, rows)}"


def _of_pairs(own: Mapping[str, Any]) -> list[str]:
    ratio = spread_text(own["throughput_ratio"], ".3f") if own["pairs"] else NONE
    return [ratio, str(own["pairs"]), str(own["dropped"])]


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
