"""Measures what the simulator needs of this machine: task times, their noise, all-reduces between two processes.

    python experiments/scaling/calibrate.py [--repetitions 3] [--json PATH]

README.md says how.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np

from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.scaling.ranks import NUM_RANKS, Case, RankPair, task_s, transfer_s
from experiments.scaling.report import CALIBRATED, result_text
from experiments.scaling.simulator import log_sigma

# With how many rounds a window has; on two cores each window takes one to several seconds.
CASES = {Case("lenet", 16): 96, Case("resnet32", 32): 16, Case("vgg16", 16): 8}
BESIDE = Case("resnet32", 32)  # what trains while all-reduces are measured
SIZES = tuple(4**power for power in range(5, 14))  # 1 KiB to 64 MiB
_PAUSE_S = 0.03
_LARGE_BYTES = 2**20  # from there on an all-reduce is long enough to see what it costs the learner


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--max-foreign-share")
    parser.add_argument("--repetitions", type=count, default=3, help="windows of each kind (default %(default)s)")
    parser.add_argument("--sizes", type=count, nargs="+", default=SIZES, help="bytes (default 1 KiB to 64 MiB)")
    return measure_pair(
        parser, argv, CALIBRATED, lambda pair, given: calibrated(pair, given.repetitions, given.cases, given.sizes)
    )


def measure_pair(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, kind: str,
    measure: Callable[[RankPair, argparse.Namespace], Mapping[str, Any]],
) -> int:  # fmt: skip
    """Measure on two ranks, of the models asked for; and note how busy the machine was."""
    models = [case.model for case in CASES]
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="default: all")

    def run(given: argparse.Namespace) -> dict[str, Any]:
        given.cases = {case: rounds for case, rounds in CASES.items() if case.model in given.models}
        load = os.getloadavg()[0]
        with RankPair(given.max_foreign_share) as pair:
            measured, shares, dropped = measure(pair, given), pair.foreign_shares, pair.dropped
        return {
            "kind": kind,
            "load_before": round(load, 2),
            "foreign_share": round(median(shares), 3) if shares else None,
            "dropped": dropped,
            **measured,
        }

    return measure_and_write(parser, argv, run, result_text)


def calibrated(
    pair: RankPair, repetitions: int, cases: Mapping[Case, int] = CASES, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """All kinds of windows in turns, as plain values. Raises RuntimeError when others leave no time to measure."""
    tasks: dict[Case, dict[str, list[float]]] = {case: {} for case in cases}
    idle: dict[int, list[float]] = {size: [] for size in sizes}
    busy: dict[int, list[float]] = {size: [] for size in sizes}
    shares: list[float] = []
    for _ in range(repetitions):
        for case, rounds in cases.items():
            _add_tasks(pair, case, rounds, tasks[case])
        for size in sizes:
            undisturbed, _ = _all_reduces(pair, size, None)
            transfers, lost_s = _all_reduces(pair, size, BESIDE)
            idle[size] += undisturbed
            busy[size] += transfers
            shares += [lost_s / mean(undisturbed)] if undisturbed and lost_s is not None else []
    if not all([*idle.values(), *busy.values(), shares, *(tasks[case].get("learning") for case in cases)]):
        raise RuntimeError("other programs were busy all the time; run this when they are not.")
    return {
        "repetitions": repetitions,
        "cases": [{**asdict(case), **_case_values(tasks[case])} for case in cases],
        "all_reduce": {
            "beside": BESIDE.name,
            "bytes": list(sizes),
            "n": [len(busy[size]) for size in sizes],
            "idle": _sweep(idle),
            "busy": _sweep(busy),
            "core_share": round(median(shares), 3),
        },
    }


def _add_tasks(pair: RankPair, case: Case, rounds: int, found: dict[str, list[float]]) -> None:
    answers = pair.ask("rounds", case=case, num_rounds=rounds, period=None)
    for answer in answers or ():
        for name in ("learning", "correction"):
            found.setdefault(name, []).extend(answer.tasks[name])
        found.setdefault("round", []).append(answer.round_s)
        # Ranks and windows differ in the mean; noise from round to round is what is around it.
        own = mean(answer.tasks["learning"])
        found.setdefault("relative", []).extend(each / own for each in answer.tasks["learning"])
    passes = pair.ask("passes", case=case, repetitions=10)
    for name in ("sum", "move"):
        found.setdefault(name, []).extend([task_s(passes, name)] if passes else [])


def _case_values(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    milliseconds = {f"{name}_ms": round(1000 * median(found[name]), 4) for name in ("round", "learning", "correction")}
    passes = {f"{name}_ms": round(1000 * median(found[name]), 4) for name in ("sum", "move")}
    return {**milliseconds, **passes, "noise": variation(found["relative"])}


def _all_reduces(pair: RankPair, size: int, beside: Case | None) -> tuple[list[float], float | None]:
    """Seconds of each, and seconds of learning that one cost a rank; None where that was not measured."""
    calls = 12 if size < _LARGE_BYTES else 16
    alone = pair.ask("rounds", case=beside, num_rounds=10, period=None) if beside and size >= _LARGE_BYTES else None
    answers = pair.ask("all_reduces", num_bytes=size, count=calls, pause_s=_PAUSE_S, beside=beside)
    if answers is None:
        return [], None
    transfers = transfer_s(answers)
    rounds = [answer.round_s for answer in answers if answer.rounds]
    if alone is None or len(rounds) < NUM_RANKS:
        return transfers, None
    slower = 1 - mean(answer.round_s for answer in alone) / mean(rounds)
    window_s = mean(answer.tasks["window"][0] for answer in answers)
    return transfers, max(0.0, slower) * window_s / len(transfers)


def _sweep(found: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    seconds = [mean(found[size]) for size in found]
    line = fit_line(list(found), seconds)
    errors = [abs(line.seconds(size) / taken - 1) for size, taken in zip(found, seconds, strict=True)]
    return {
        "us": [round(1e6 * each, 1) for each in seconds],
        "alpha_us": round(1e6 * line.alpha_s(NUM_RANKS), 1),
        "gb_per_s": round(line.bytes_per_s(NUM_RANKS) / 1e9, 3),
        "line_off": round(median(errors), 3),
    }


def all_reduce_s(calibration: Mapping[str, Any], num_bytes: float, kind: str) -> float:
    """The seconds that were measured at a size, `idle` or `busy`."""
    sweep = calibration["all_reduce"]
    return between(sweep["bytes"], [each / 1e6 for each in sweep[kind]["us"]], num_bytes)


@dataclass(frozen=True)
class Line:
    """Seconds = `fixed_s` + bytes · `s_a_byte`; of a ring of n, fixed_s = 2·(n−1)·α and s_a_byte = 2·(n−1)/(n·β)."""

    fixed_s: float
    s_a_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.fixed_s + num_bytes * self.s_a_byte

    def alpha_s(self, ranks: int) -> float:
        return self.fixed_s / (2 * (ranks - 1))

    def bytes_per_s(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks / self.s_a_byte


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the smallest sum of squared relative errors: microseconds and tens of milliseconds count alike."""
    taken = np.asarray(seconds)
    columns = np.stack([1 / taken, np.asarray(sizes) / taken], axis=1)
    fixed_s, s_a_byte = np.linalg.lstsq(columns, np.ones(len(taken)), rcond=None)[0]
    return Line(max(0.0, float(fixed_s)), max(0.0, float(s_a_byte)))


def between(sizes: Sequence[int], seconds: Sequence[float], num_bytes: float) -> float:
    """Seconds at a size between measured ones, on straight lines between the logarithms; α and β beyond the last."""
    return float(np.exp(np.interp(math.log(num_bytes), np.log(sizes), np.log(seconds))))


def variation(seconds: Sequence[float]) -> dict[str, float]:
    """The tasks' coefficient of variation, and their quantiles by those of a log-normal with the same mean and it.

    A ratio of 1 says that the distribution has as much weight out there as measured.
    """
    middle = mean(seconds)
    cv = pstdev(seconds) / middle
    sigma, ordered = log_sigma(cv), sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return {
        "cv": round(cv, 4),
        "median_by_lognormal": round(median(seconds) / (middle * math.exp(-(sigma**2) / 2)), 3),
        "p95_by_lognormal": round(p95 / (middle * math.exp(1.6449 * sigma - sigma**2 / 2)), 3),
        "n": len(seconds),
    }


if __name__ == "__main__":
    raise SystemExit(main())
