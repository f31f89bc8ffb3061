"""Two searchers on two cores against one on one core, and against two searches: trials a second under torchrun.

    python experiments/ranks/search.py [--repetitions 3] [--json PATH] [KEY=VALUE ...]

README.md says what is compared and how.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import optuna

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.core.host import foreign_share, usable_core_ids
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import JOURNAL_FILE
from crossbow_py.search.study.storage import open_storage
from crossbow_py.telemetry.records import read_json
from experiments.bench.machine import ROOT, on_cores
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import load_with_ended, paired_ratios, spread
from experiments.tables.markdown import NONE, markdown_table, spread_text

Result = Mapping[str, Any]
ONE, TWO, APART = SIDES = ("one searcher", "two searchers", "two searches")
KIND, WANTED = "search", 1.8
# Twelve brackets of 27 trials, so that neither side is ever without trials to train, but at the very end.
DEFAULTS = ("+experiment=search_digits", "method=successive_halving", "num_trials=324", "min_epochs=2", "max_epochs=54")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=3, help="searches by each side (default %(default)s)")
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the search (default {' '.join(DEFAULTS)})")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        return measure_searchers(given.overrides or DEFAULTS, given.repetitions)

    return measure_and_write(parser, argv, measure, result_text)


def measure_searchers(overrides: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Search `repetitions` times by each side, in one order and then the other.

    One search by one and by two searchers comes before: it measures how wide packs pay, which is remembered.
    """
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    first, second = (sorted(usable_core_ids()) * 2)[:2]  # the same one twice where there is no other
    search: dict[str, Callable[[], dict[str, Any]]] = {
        ONE: lambda: run_search(overrides, [first]),
        TWO: lambda: run_search(overrides, [first, second]),
        APART: lambda: run_apart(overrides, [first, second]),
    }
    for repetition in range(repetitions + 1):
        for side in SIDES if repetition % 2 else reversed(SIDES):
            if not repetition and side == APART:
                continue
            run = search[side]()
            print(f"repetition {repetition}: {side}, {run}", flush=True)
            if repetition:
                runs[side].append(run)
    return {
        "kind": KIND,
        "overrides": list(overrides),
        "repetitions": repetitions,
        "runs": runs,
        **ratios_of({side: [run["trials_per_s"] for run in each] for side, each in runs.items()}),
    }


def ratios_of(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Trials/s by side, and ratios within repetitions."""
    return {
        "trials_per_s": {side: spread(each) for side, each in rates.items()},
        "two_over_one": spread(paired_ratios(rates[TWO], rates[ONE])),
        "apart_over_one": spread(paired_ratios(rates[APART], rates[ONE])),
    }


def run_search(overrides: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
    """One search, by a searcher a core, which is a thread each. Raises UserError if it fails."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "search"
        words = [*overrides, "device=cpu", f"output_dir={folder}"]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(cores)}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        before, begun_s = load_with_ended(), time.perf_counter()
        command = [sys.executable, *launcher, "-m", "crossbow_py.search", *words]
        with on_cores(cores):
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        wall_s, share = time.perf_counter() - begun_s, foreign_share(before, load_with_ended())
        if done.returncode:
            raise UserError(f"a search by {len(cores)} searchers failed: {done.stderr.strip()[-2000:]}")
        config = compose(words, SearchConfig)
        span_s = searched_s(folder / JOURNAL_FILE, config.study or config.experiment)
        summary = read_json(folder / "search.json")
    trials = len(summary["trials"])
    return {
        "trials": trials,
        "trials_per_s": round(trials / span_s, 4),
        "searched_s": round(span_s, 2),
        "apart_s": round(wall_s - span_s, 2),
        "best_value": summary["best"]["value"],
        "foreign_share": None if share is None else round(share, 3),
    }


def run_apart(overrides: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
    """A search a core at the same time, which know nothing of each other: all that these cores give."""
    with ThreadPoolExecutor(len(cores)) as pool:  # `on_cores` is of the thread that calls it
        runs = list(pool.map(lambda core: run_search(overrides, [core]), cores))
    return {
        "trials": sum(run["trials"] for run in runs),
        "trials_per_s": round(sum(run["trials_per_s"] for run in runs), 4),
        "searched_s": max(run["searched_s"] for run in runs),
        "apart_s": max(run["apart_s"] for run in runs),
        "best_value": max(run["best_value"] for run in runs),
        "foreign_share": None,  # each is foreign to the other
    }


def searched_s(journal: Path, study: str) -> float:
    """Seconds from the first claim of a rung to the last result of one, as the storage has them."""
    records = optuna.load_study(study_name=f"{study}/segments", storage=open_storage(f"journal:{journal}", time.sleep))
    return span_s([(each.datetime_start, each.datetime_complete) for each in records.trials if each.values])


def span_s(times: Sequence[tuple[datetime | None, datetime | None]]) -> float:
    begun, ended = ([time for time in own if time is not None] for own in zip(*times, strict=True))
    span: timedelta = max(ended) - min(begun)
    return span.total_seconds()


def headline(result: Result) -> str:
    ratio, apart = result["two_over_one"], result["apart_over_one"]
    verdict = "reached" if ratio["median"] >= WANTED else "missed"
    return (
        f"Two searchers of a thread each end {spread_text(ratio)} times as many trials a second as one "
        f"(n={result['repetitions']}); at least {WANTED} was wanted: {verdict}. Two searches that know nothing of each "
        f"other end {spread_text(apart)} times as many on these cores."
    )


def result_text(result: Result) -> str:
    rows = []
    for side in SIDES:
        runs = result["runs"][side]
        foreign = [run["foreign_share"] for run in runs if run["foreign_share"] is not None]
        rows.append(
            [
                side,
                spread_text(result["trials_per_s"][side], ".2f"),
                spread_text(spread([run["searched_s"] for run in runs]), ".1f"),
                spread_text(spread([run["apart_s"] for run in runs]), ".1f"),
                spread_text(spread([run["best_value"] for run in runs]), ".4f"),
                spread_text(spread(foreign), ".0%") if foreign else NONE,
                str(len(runs)),
            ]
        )
    header = ["", "trials/s", "seconds of searching", "of starting and ending", "best value", "others had", "n"]
    return f"{headline(result)}\n\n`{' '.join(result['overrides'])}`\n\n{markdown_table(header, rows)}"


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
