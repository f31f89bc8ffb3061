"""What do the five examples come to, and how long do they take, beside the loop of plain PyTorch?

    python experiments/tasks/run.py [--examples tabular ...] [--repetitions 3] [--json PATH]

Both sides of an example take turns. README.md says what is measured.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.host import foreign_share
from experiments.bench.machine import ROOT, machine
from experiments.bench.program import count, measuring_parser, show_and_write
from experiments.bench.torchvision import import_torchvision
from experiments.bench.windows import load_with_ended, spread
from experiments.tables.markdown import NONE, markdown_table, spread_text

Result = Mapping[str, Any]
# What each is called, what it scores, how many learners it has, and what else `main` is given.
EXAMPLES: Mapping[str, tuple[str, str, int, Mapping[str, Any]]] = {
    "fine_tune": ("a model of timm on a folder, from random weights", "accuracy", 2, {"pretrained": False}),
    "tabular": ("tabular, with categories", "accuracy", 4, {}),
    "segmentation": ("segmentation", "right pixels", 2, {}),
    "bert_classifier": ("a BERT of transformers", "accuracy", 4, {}),
    "char_gpt": ("a small GPT, batches of 8", "loss a byte", 2, {}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run as asked for; prints the table and returns the exit code."""
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--examples", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES), metavar="NAME", help="by default all")
    add("--repetitions", type=count, default=3, help="runs of each side (default %(default)s)")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # packages' own
    sys.path.append(str(ROOT / "docs" / "examples"))
    rows = [_measured(name, options.repetitions) for name in options.examples]
    result = {"machine": machine(), "repetitions": options.repetitions, "rows": rows}
    show_and_write(result, result_text, options.json)
    return 0


def _measured(name: str, repetitions: int) -> dict[str, Any]:
    title, score, num_learners, given = EXAMPLES[name]
    if name == "fine_tune":
        import_torchvision()
    module, runs = importlib.import_module(name), []
    for seed in range(repetitions):
        before = load_with_ended()
        plain, learners = module.main(**given, num_learners=num_learners, seed=seed)
        share = foreign_share(before, load_with_ended())
        runs.append({"seed": seed, "plain": plain, "learners": learners, "foreign_share": share})
    return {"example": name, "title": title, "score": score, "num_learners": num_learners, "runs": runs}


def result_text(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        sides = [[run[side] for run in row["runs"]] for side in ("plain", "learners")]
        shares = [run["foreign_share"] for run in row["runs"] if run["foreign_share"] is not None]
        (plain, plain_s), (learners, learners_s) = (zip(*side, strict=True) for side in sides)
        rows.append([
            row["title"], row["score"], spread_text(spread(plain), ".3f"), spread_text(spread(plain_s), ".1f"),
            str(row["num_learners"]), spread_text(spread(learners), ".3f"), spread_text(spread(learners_s), ".1f"),
            spread_text(spread([a / b for a, b in zip(plain_s, learners_s, strict=True)])),
            f"{median(shares):.0%}" if shares else NONE,
        ])  # fmt: skip
    header = ["example", "score", "plain loop", "s", "K", "learners", "s", "plain ÷ learners, s", "others took"]
    counted = f"Medians of {result['repetitions']} seeds, smallest and largest; seconds are of training."
    return f"{markdown_table(header, rows)}\n\n{counted}"


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
