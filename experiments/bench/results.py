"""Results files: one JSON object each, in the `results` folder beside the script that wrote it.

They are kept in the repository, so they are small: numbers have eight significant digits, and the records of a curve
are written as columns, in which numbers have six.
"""

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
_DIGITS, _DIGITS_IN_COLUMNS = 8, 6


def results_folder(experiment: str) -> Path:
    return EXPERIMENTS / experiment / "results"


def read_results(experiment: str) -> dict[str, dict[str, Any]]:
    """All results of an experiment by the name of their file, in the order of names."""
    return {path.stem: read_result(path) for path in sorted(results_folder(experiment).glob("*.json"))}


def read_result(path: Path) -> Any:
    return json.loads(path.read_text(), object_hook=_records)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a line for every key of a result, and one for every element of a list of objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}:{_lines(_compact(value))}" for key, value in result.items())
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    parts = value if isinstance(value, list) and any(isinstance(each, dict | list) for each in value) else ()
    texts = [json.dumps(each, separators=(",", ":")) for each in parts or (value,)]
    return "[\n" + ",\n".join(texts) + "\n]" if parts else texts[0]


def _compact(value: Any, depth: int = 0) -> Any:
    """Round numbers, and turn lists of records within `depth` other lists, at least one, into columns."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS if depth < 2 else _DIGITS_IN_COLUMNS}g}")
    if isinstance(value, Mapping):
        return {key: _compact(each, depth) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    alike = all(isinstance(each, dict) and each and each.keys() == value[0].keys() for each in value)
    if depth and len(value) > 1 and alike:
        return {"columns": {key: _compact([each[key] for each in value], depth + 1) for key in value[0]}}
    return [_compact(each, depth + 1) for each in value]


def _records(found: dict[str, Any]) -> Any:
    """Turn columns back into records."""
    if found.keys() != {"columns"}:
        return found
    return [dict(zip(found["columns"], values, strict=True)) for values in zip(*found["columns"].values(), strict=True)]


def show_and_write(result: dict[str, Any], text: Callable[[dict[str, Any]], str], path: Path | None) -> None:
    """Print the tables of a result and write it; the tables are then those of the numbers in the file."""
    if path:
        write_result(path, result)
        result = read_result(path)
    print(f"\n{text(result)}\n\n{machine_line(result['machine'])}")
    if path:
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
