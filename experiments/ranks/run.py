"""Two ranks on two cores against one rank on one, against no averaging, and against DistributedDataParallel.

    python experiments/ranks/run.py [--model resnet32 --batch-size 32] [--json PATH]

README.md says what the sides are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import paired_ratios, spread
from experiments.ranks import search
from experiments.ranks.pair import Measured, RankPair
from experiments.ranks.sides import BUCKETS_MB, serve
from experiments.tables.markdown import markdown_table, spread_text, texts_of_kind

Result = Mapping[str, Any]
NAMES = {
    "alone": "one rank on one core",
    "sma": "two ranks, averaging every round",
    "apart": "two ranks that never average",
    "ddp_1": "DistributedDataParallel, buckets of 1 MB",
    "ddp_25": "DistributedDataParallel, one bucket",
}
DDP = tuple(f"ddp_{size}" for size in BUCKETS_MB)
SIDES = ("sma", "apart", "alone", *DDP)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=("resnet32", "vgg16", "lenet"), default="resnet32", help="default %(default)s")
    add("--batch-size", type=count, default=32, help="of a rank (default %(default)s)")
    add("--rounds", type=count, default=8, help="in a window (default %(default)s)")
    add("--repetitions", type=count, default=10, help="windows of each side (default %(default)s)")
    return measure_and_write(
        parser, argv, lambda given: measure_ranks(given.model, given.batch_size, given.rounds, given.repetitions),
        result_text,
    )  # fmt: skip


def measure_ranks(model: str, batch_size: int, num_rounds: int, repetitions: int) -> dict[str, Any]:
    """Images/s of every side and the ratios asked for, within repetitions, as plain values."""
    rates: dict[str, list[float | None]] = {side: [] for side in SIDES}
    with RankPair(serve) as pair:
        pair.ask("prepare", model=model, batch_size=batch_size)
        for number in range(repetitions):
            for side in SIDES if number % 2 else SIDES[::-1]:
                answers = pair.window(side=side, num_rounds=num_rounds)
                rates[side].append(None if answers is None else _rate(side, answers, batch_size))
        dropped = pair.dropped
    best = max(DDP, key=lambda side: median([rate for rate in rates[side] if rate] or [0.0]))
    return {
        "model": model,
        "batch_size": batch_size,
        "rounds": num_rounds,
        "repetitions": repetitions,
        "dropped": dropped,
        "images_per_s": {side: spread([rate for rate in rates[side] if rate]) for side in SIDES},
        "images_per_s_windows": {side: [rate and round(rate, 2) for rate in rates[side]] for side in SIDES},
        "best_ddp": best,
        "sma_over_alone": _ratio(rates["sma"], rates["alone"]),
        "apart_over_alone": _ratio(rates["apart"], rates["alone"]),
        "exposed_share": _ratio(rates["sma"], rates["apart"], share=True),
        "sma_over_ddp": _ratio(rates["sma"], rates[best]),
    }


def _rate(side: str, answers: Sequence[Measured], batch_size: int) -> float:
    trained = answers[:1] if side == "alone" else answers
    return sum(batch_size / answer.round_s for answer in trained)


def _ratio(
    own: Sequence[float | None], other: Sequence[float | None], share: bool = False
) -> dict[str, float] | None:
    """own/other within repetitions; as a share, how much of a round of `own` the `other` does without."""
    return spread([1 - ratio if share else ratio for ratio in paired_ratios(own, other)])


def sides_table(result: Result) -> str:
    windows = result["images_per_s_windows"]
    rows = [
        [NAMES[side], spread_text(rates, ".1f"), str(sum(rate is not None for rate in windows[side]))]
        for side, rates in result["images_per_s"].items()
    ]
    return markdown_table(["", "images/s in all", "n"], rows)


def ratios_table(result: Result) -> str:
    rows = [
        ["two ranks ÷ one rank on one core", spread_text(result["sma_over_alone"], ".2f"), "≥ 1.9"],
        ["the same without any averaging: what these cores allow", spread_text(result["apart_over_alone"], ".2f"), ""],
        ["of a round, averaging that is not hidden", spread_text(result["exposed_share"], ".1%"), "≤ 5 %"],
        ["two ranks ÷ the better DistributedDataParallel", spread_text(result["sma_over_ddp"], ".2f"), "≥ 1.0"],
    ]
    return markdown_table(["", "median (least–most)", "wanted"], rows)


def result_text(result: Result) -> str:
    head = (
        f"{result['model']}, b = {result['batch_size']} a rank, windows of {result['rounds']} rounds; "
        f"{result['dropped']} windows were dropped."
    )
    return f"{head}\n\n{sides_table(result)}\n\n{ratios_table(result)}"


TABLES = {"all": result_text}
TABLES_OF_KIND = {search.KIND: search.TABLES}
TABLES_OVER_ALL = {"searchers": texts_of_kind(search.KIND, search.headline)}


if __name__ == "__main__":
    raise SystemExit(main())
