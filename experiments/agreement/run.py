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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.agreement import nets, setup, throughput
from experiments.agreement.report import result_text
from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("what", choices=["nets", "setup", "throughput"])
    parser.add_argument("--models", nargs="+", choices=list(setup.SHAPES), help="by default all there are")
    parser.add_argument("--executors", nargs="+", choices=throughput.EXECUTORS, default=throughput.EXECUTORS)
    parser.add_argument("--before", metavar="COMMIT", help="which throughput is compared with, as git knows it")
    parser.add_argument("--seconds", type=positive, default=1.5, help="of a window (default %(default)s)")
    parser.add_argument("--repetitions", type=count, default=7, help="of every measurement (default %(default)s)")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"machine": machine()}
    if options.what == "throughput":
        if options.before is None:
            parser.error("throughput needs --before COMMIT, which it is compared with")
        result |= {"before": options.before, "throughput": _throughputs(options)}
        show_and_write(result, result_text, options.json)
        return 0
    if options.what == "nets":
        known = {name: own for name, own in nets.NETS.items() if name != "tiny Llama" or _has_transformers()}
        result["nets"] = {name: {each: nets.trained(name, each) for each in nets.EXECUTORS} for name in known}
    else:
        result["setup"] = {
            f"{model} {precision}": setup.measure(model, precision, options.repetitions)
            for model in options.models or setup.SHAPES
            for precision in ("fp32", "bf16")
        }
    show_and_write(result, result_text, options.json)
    return 0


def _throughputs(options: argparse.Namespace) -> dict[str, Any]:
    models = [model for model in options.models or throughput.MODELS if model in throughput.MODELS]
    with throughput.tree_of(options.before) as before:
        return {
            f"{model} {executor}": throughput.measure(before, model, executor, options.repetitions, options.seconds)
            for model in models
            for executor in options.executors
        }


def _has_transformers() -> bool:
    if importlib.util.find_spec("transformers"):
        return True
    print("no tiny Llama: transformers is not installed; pip install '.[zoo]'")
    return False


if __name__ == "__main__":
    raise SystemExit(main())
