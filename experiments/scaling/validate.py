"""Compares predicted round times with those of two real processes that average by gloo.

    python experiments/scaling/validate.py [--repetitions 5] [--json PATH]

Reads what calibrate.py measured; README.md says how the prediction is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.program import count, measuring_parser
from experiments.bench.results import read_results
from experiments.bench.windows import spread
from experiments.scaling.calibrate import CASES, all_reduce_s, measure_pair
from experiments.scaling.inputs import PARAMETERS
from experiments.scaling.ranks import NUM_RANKS, Case, Measured, RankPair
from experiments.scaling.report import CALIBRATED, VALIDATED
from experiments.scaling.simulator import Averaging, Contention, Tasks, sma_round_s

PERIODS = (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--max-foreign-share")
    parser.add_argument("--repetitions", type=count, default=5, help="windows of each kind (default %(default)s)")
    found = [result for result in read_results("scaling").values() if result["kind"] == CALIBRATED]
    if not found:
        parser.error("there is no calibration yet; run experiments/scaling/calibrate.py --json first.")

    def measure(pair: RankPair, given: argparse.Namespace) -> dict[str, Any]:
        rows = [row for case in given.cases for row in compared(pair, case, found[0], given.repetitions)]
        return {"repetitions": given.repetitions, "rows": rows}

    return measure_pair(parser, argv, VALIDATED, measure)


def compared(
    pair: RankPair, case: Case, calibration: Mapping[str, Any], repetitions: int
) -> list[dict[str, Any]]:
    """A row a period. Every window that averages stands between two that do not, which say what learning takes."""
    own = next(each for each in calibration["cases"] if Case(each["model"], each["batch_size"]) == case)
    windows: dict[int, list[tuple[float, float, float]]] = {period: [] for period in PERIODS}
    for _ in range(repetitions):
        before = _window(pair, case, None)
        for period in PERIODS:
            averaged, after = _window(pair, case, period), _window(pair, case, None)
            if before and averaged and after:
                assert len({answer.checksum for answer in averaged}) == 1, "z differs between the ranks"
                alone_s = [mean(pair_of) for pair_of in zip(_rounds_s(before), _rounds_s(after), strict=True)]
                predicted_s = predicted(alone_s, own, calibration, period)
                windows[period].append((mean(_rounds_s(averaged)), predicted_s, mean(alone_s)))
            before = after
    return [{**asdict(case), "period": period, **_row(windows[period])} for period in PERIODS]


def predicted(
    alone_s: Sequence[float], own: Mapping[str, Any], calibration: Mapping[str, Any], period: int
) -> float:
    """Seconds a round, by the simulator, for ranks whose rounds take `alone_s` each when nothing is averaged.

    A rank's core is shared alike by learner and averaging, so passes over memory take twice as long beside learning; an
    all-reduce takes what it took beside learning in the calibration. What averaging computes, the learner loses.
    """
    num_bytes = 4 * PARAMETERS[own["model"]]
    idle_s, busy_s = (all_reduce_s(calibration, num_bytes, kind) for kind in ("idle", "busy"))
    passes_s, correction_s = (own["sum_ms"] + own["move_ms"]) / 1000, own["correction_ms"] / 1000
    learning_s = mean(alone_s) - correction_s
    tasks = Tasks(
        learning_s=learning_s,  # what the engine itself takes between tasks is counted as learning
        correction_s=correction_s,
        sum_s=own["sum_ms"] / 1000,
        move_s=own["move_ms"] / 1000,
        cv=own["noise"]["cv"],
    )
    under_way_s, lost_s = 2 * passes_s + busy_s, passes_s + calibration["all_reduce"]["core_share"] * idle_s
    contention = Contention(
        slowdown=min(0.99, lost_s / under_way_s), stretch=max(1.0, under_way_s / (passes_s + idle_s))
    )
    averaging = Averaging(all_s=idle_s, period=period)
    factors = [(each - correction_s) / learning_s for each in alone_s]
    return sma_round_s(tasks, NUM_RANKS, averaging, contention, rank_factors=factors)


def _window(pair: RankPair, case: Case, period: int | None) -> list[Measured] | None:
    return pair.ask("rounds", case=case, num_rounds=CASES[case], period=period)


def _rounds_s(answers: Sequence[Measured]) -> list[float]:
    return [answer.round_s for answer in answers]


def _row(windows: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    if not windows:
        return {"n": 0}
    measured, predictions, alone = ([window[column] for window in windows] for column in range(3))
    return {
        "n": len(windows),
        "alone_ms": round(1000 * median(alone), 3),
        "measured_ms": round(1000 * median(measured), 3),
        "predicted_ms": round(1000 * median(predictions), 3),
        "error": spread([p / m - 1 for p, m in zip(predictions, measured, strict=True)]),
        "exposed": spread([1 - a / m for a, m in zip(alone, measured, strict=True)]),
        "predicted_exposed": spread([1 - a / p for a, p in zip(alone, predictions, strict=True)]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
