"""Results files: one JSON object each, in the `results` folder beside the script that wrote it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crossbow_py.telemetry.records import write_atomically
from experiments.bench.machine import ROOT, machine_line
from experiments.bench.windows import MAX_FOREIGN_SHARE

EXPERIMENTS = ROOT / "experiments"


def results_folder(experiment: str) -> Path:
    return EXPERIMENTS / experiment / "results"


def read_results(experiment: str) -> dict[str, dict[str, Any]]:
    """All results of an experiment by the name of their file, in the order of names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(results_folder(experiment).glob("*.json"))}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def show_and_write(result: dict[str, Any], text: Callable[[dict[str, Any]], str], path: Path | None) -> None:
    print(f"\n{text(result)}\n\n{machine_line(result['machine'])}")
    if path:
        write_result(path, result)
        print(f"written to {path}")


def measuring_parser(
    doc: str | None, *common: str, written: str = "write the results there"
) -> argparse.ArgumentParser:
    """Make the parser of a program that measures: the first line of its docstring, `--json`, and some of `_COMMON`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--json", type=Path, metavar="PATH", help=written)
    for name in common:
        parser.add_argument(name, **_COMMON[name])
    return parser


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A finite number greater than 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return number


_COMMON: dict[str, dict[str, Any]] = {
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "default %(default)s"},
    "--folder": {"default": "flowers_300",
                 "help": "the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)"},
    "--max-foreign-share": {
        "type": positive, "default": MAX_FOREIGN_SHARE,
        "help": "drop windows in which others take a larger share of the cores (default %(default)s)",
    },
}  # fmt: skip


def seeds(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; argparse turns a ValueError into its own message."""
    return tuple(int(seed) for seed in text.split(","))
