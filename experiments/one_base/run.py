"""What does a frozen base cost for many learners and many adapters: counted, and in the kernel's account?

    python experiments/one_base/run.py [--before COMMIT] [--jobs JOB ...] [--repetitions N] [--json PATH]

README.md says what is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.before_and_now.run import tree_of
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.results import read_results
from experiments.many_models import tokens
from experiments.many_models.run import CORES, PLAIN, images_per_s
from experiments.tables.markdown import NONE, markdown_table

_SIDE = Path(__file__).with_name("side.py")
JOBS = {
    ("finetune", 1): "run of one learner, 95 % frozen, AdamW",
    ("finetune", 8): "run of 8 learners, the same",
    ("adapters", 1): "one LoRA adapter, rank 8, BERT of 11 M, AdamW",
    ("adapters", 16): "16 of them in a pack",
}
_HEAD = ("", "tensors, MB", "resident, MB", "peak, MB", "tensors before, MB", "resident before", "now ÷ before", "n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--before", metavar="COMMIT", help="which this checkout is compared with, as git knows it")
    add("--jobs", choices=("finetune", "adapters"), nargs="+", default=["finetune", "adapters"], help="default: both")
    add("--repetitions", type=count, default=3, help="of every measurement (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    runs = []
    with tree_of(given.before) if given.before else contextlib.nullcontext() as before:
        for _ in range(given.repetitions):
            for job, number in (own for own in JOBS if own[0] in given.jobs):
                for side, tree in (("before", before), ("now", ROOT)):
                    if tree is not None:
                        runs.append({"job": job, "count": number, "side": side, **_side(tree, job, number)})
    return {"before": given.before, "runs": runs}


def _side(tree: Path, job: str, number: int) -> dict[str, int]:
    words = [sys.executable, "-P", str(_SIDE), job, str(number)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def result_text(result: Mapping[str, Any]) -> str:
    rows = []
    known = {run["job"] for run in result["runs"]}
    for (job, number), what in ((own, what) for own, what in JOBS.items() if own[0] in known):
        of = partial(_megabytes, result, job, number)
        now = [of("now", key) for key in ("held", "resident", "peak")]
        before = [of("before", key) for key in ("held", "resident")]
        ratio = NONE if before[0] is None or now[0] is None else f"{now[0] / before[0]:.2f}"
        cells = [NONE if each is None else f"{each:,.0f}" for each in (*now, *before)]
        times = sum((run["job"], run["count"], run["side"]) == (job, number, "now") for run in result["runs"])
        rows.append([what, *cells, ratio, str(times)])
    return markdown_table(_HEAD, rows)


def _megabytes(result: Mapping[str, Any], job: str, number: int, side: str, key: str) -> float | None:
    runs = [run for run in result["runs"] if (run["job"], run["count"], run["side"]) == (job, number, side)]
    return median(run[key] for run in runs) / 1e6 if runs else None


def summary_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What one base and one row gain in all: of this experiment, of many_models and of averaged_gradients."""
    of = partial(_megabytes, results["cpu"])
    finetune = of("finetune", 1, "now", "held"), of("finetune", 1, "before", "held")
    adapters = [_megabytes(results["adapters"], "adapters", number, "now", "held") for number in (16, 1)]
    rows = [
        ["tensors of 16 adapters ÷ of one", _ratio(*adapters)],
        ["tensors of a run of which 95 % is frozen ÷ before", _ratio(*finetune)],
    ]
    many = read_results("many_models")
    for row in many["tokens"]["rows"]:
        what = f"16 adapters, {row['step'].replace('x', ' × ')} tokens a step: samples/s ÷ one after another"
        rows.append([what, f"{median(tokens.ratios(row)):.2f}"])
    for task, what in (("adapters", "the same of 2 × 32 tokens on another day"), ("probes", "16 linear layers")):
        runs = [run for run in many["frozen"]["runs"] if run["task"] == task]
        rates = [images_per_s(runs, side) for side in ("many", PLAIN, CORES)]
        rows.append([f"{what}: samples/s ÷ one after another · ÷ a process a core",
                     f"{_ratio(*rates[:2])} · {_ratio(rates[0], rates[2])}"])  # fmt: skip
    equal = read_results("averaged_gradients")["cpu"]["rows"]
    for model in dict.fromkeys(row["model"] for row in equal):
        own = max((row for row in equal if row["model"] == model and row["bytes"] <= 1.1 * row["bytes_of_one"]
                   and row["side"] != "tuned_single"), key=lambda row: row["ratios"]["median"])  # fmt: skip
        what = f"8 equal learners of {model} by {own['side']}: images/s · bytes ÷ one model's"
        rows.append([what, f"{own['ratios']['median']:.2f} · {own['bytes'] / own['bytes_of_one']:.2f}"])
    return markdown_table(["", "ratio"], rows)


def _ratio(own: float | None, other: float | None) -> str:
    return f"{own / other:.2f}" if own and other else NONE


TABLES = {"all": result_text}
TABLES_OVER_ALL = {"summary": summary_text}

if __name__ == "__main__":
    raise SystemExit(main())
