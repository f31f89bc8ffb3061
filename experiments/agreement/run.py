"""Does every executor train what plain PyTorch trains, or refuse, and what does finding out cost?

    python experiments/agreement/run.py nets [--json PATH]
    python experiments/agreement/run.py setup [--repetitions 7] [--json PATH]
    python experiments/agreement/run.py throughput --before COMMIT [--repetitions 7] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.errors import UserError
from experiments.agreement import nets, setup, throughput
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]
SAME = 1e-4  # relative: float32 after ten rounds


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("what", choices=["nets", "setup", "throughput"])
    add("--models", nargs="+", choices=list(setup.SHAPES), help="by default all there are")
    add("--executors", nargs="+", choices=throughput.EXECUTORS, default=throughput.EXECUTORS)
    add("--before", metavar="COMMIT", help="which throughput is compared with, as git knows it")
    add("--seconds", type=positive, default=1.5, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="of every measurement (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.what == "throughput":
        if given.before is None:
            raise UserError("throughput needs --before COMMIT, which it is compared with")
        return {"before": given.before, "throughput": _throughputs(given)}
    if given.what == "nets":
        known = [name for name in nets.NETS if name != "tiny Llama" or _has_transformers()]
        return {"nets": {name: {each: nets.trained(name, each) for each in nets.EXECUTORS} for name in known}}
    return {
        "setup": {
            f"{model} {precision}": setup.measure(model, precision, given.repetitions)
            for model in given.models or setup.SHAPES
            for precision in ("fp32", "bf16")
        }
    }


def _throughputs(given: argparse.Namespace) -> dict[str, Any]:
    models = [model for model in given.models or throughput.MODELS if model in throughput.MODELS]
    with throughput.tree_of(given.before) as before:
        return {
            f"{model} {executor}": throughput.measure(before, model, executor, given.repetitions, given.seconds)
            for model in models
            for executor in given.executors
        }


def _has_transformers() -> bool:
    if importlib.util.find_spec("transformers"):
        return True
    print("no tiny Llama: transformers is not installed; pip install '.[zoo]'")
    return False


def result_text(result: Result) -> str:
    if "throughput" in result:
        return throughput_table(result)
    return nets_table(result) if "nets" in result else setup_table(result)


def nets_table(result: Result) -> str:
    executors = list(next(iter(result["nets"].values())))
    rows = [[name, *(_cell(own[executor]) for executor in executors)] for name, own in result["nets"].items()]
    reasons = {own["refused"] for each in result["nets"].values() for own in each.values() if "refused" in own}
    return "\n\n".join([markdown_table(["", *executors], rows), *(f"- {reason}" for reason in sorted(reasons))])


def _cell(own: Mapping[str, Any]) -> str:
    if "refused" in own:
        return "refused"
    verdict = "" if own["distance"] <= SAME else " DIFFERENT"
    return f"{own['distance']:.0e} ({own['executor']}){verdict}"


def setup_table(result: Result) -> str:
    rows = [
        [name, *(spread_text(own[key], form) for key, form in (("without", ".2f"), ("with", ".2f"), ("ratio", ".2f"))),
         str(own["n"])]
        for name, own in result["setup"].items()
    ]  # fmt: skip
    return markdown_table(["", "without, s", "with, s", "with ÷ without", "n"], rows)


def throughput_table(result: Result) -> str:
    columns = (("before", ",.0f"), ("now", ",.0f"), ("ratio", ".3f"))
    rows = [
        [name, *(spread_text(own[key], form) for key, form in columns), str(own["n"])]
        for name, own in result["throughput"].items()
    ]
    return markdown_table(["", f"commit {result['before']}, images/s", "now, images/s", "now ÷ before", "n"], rows)


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
