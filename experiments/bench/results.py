"""Results files: one JSON object each, in the `results` folder beside the script that wrote it.

They are kept in the repository, so they are small: numbers have eight significant digits, and the records of a curve
are written as columns, in which numbers have six.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow_py.telemetry.records import write_atomically
from experiments.bench.machine import ROOT

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
