"""From how many tokens a step does a pack of adapters stop paying, as one adapter alone fills the device?

    python experiments/many_models/tokens.py [--steps BxT ...] [--turns N] [--quick] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import paired_ratios, spread
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]
KIND, IN_TURNS = "tokens", "in turns"
STEPS = ("1x8", "1x32", "2x32", "4x32", "8x32", "8x64")
_PACKS = re.compile(r"Members of .* run (?:in packs of (\d+)|one at a time)")
_JOBS = Path(__file__).with_name("jobs.py")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--steps", type=step, nargs="+", default=[*STEPS], metavar="BxT", help="samples by tokens of each step")
    add("--turns", type=count, default=3, help="of both sides (default %(default)s)")
    add("--quick", action="store_true", help="twenty times less data")
    return measure_and_write(parser, argv, measure, result_text)


def step(text: str) -> str:
    """Two whole numbers of at least 1, for argparse."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be samples by tokens, such as 2x32, got {text!r}")
    return text


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Each size of a step in a process of its own, in which the sides take turns."""
    rows = []
    for own in given.steps:
        words = [sys.executable, str(_JOBS), f"adapters {own}", IN_TURNS, str(given.turns)]
        words += ["--quick"] if given.quick else []
        load = os.getloadavg()[0]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        sizes = [int(found[1] or 1) for found in map(_PACKS.match, done.stderr.splitlines()) if found is not None]
        rows.append({"step": own, "load_before": load, "side_by_side": sizes,
                     "rates": json.loads(done.stdout.splitlines()[-1])})  # fmt: skip
        print(f"{own}: {result_text({'rows': rows[-1:]}).splitlines()[-1]}", file=sys.stderr)
    return {"kind": KIND, "rows": rows}


def ratios(row: Mapping[str, Any]) -> list[float]:
    """Turn by turn: samples/s side by side ÷ those of the loop with the better number of threads."""
    rates = {side: own for side, own in row["rates"].items() if side != "many"}
    best = max(rates.values(), key=median)
    return paired_ratios(row["rates"]["many"], best)


def result_text(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        batch, length = map(int, row["step"].split("x"))
        many, *loop = (median(own) for own in row["rates"].values())
        sizes = "–".join(map(str, sorted(set(row["side_by_side"]))))  # one each call; where packs do not pay, 1
        cells = [f"{batch * length}", sizes, f"{many:,.0f}", f"{max(loop):,.0f}", spread_text(spread(ratios(row)))]
        rows.append([f"{batch} × {length} tokens", *cells, str(len(row["rates"]["many"]))])
    head = ("step of an adapter", "tokens", "side by side", "16 adapters, samples/s", "one after another", "ratio", "n")
    return markdown_table(head, rows)


if __name__ == "__main__":
    raise SystemExit(main())
