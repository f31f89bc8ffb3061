"""Results files: one JSON object each, in the `results` folder beside the script that wrote it.

They are kept in the repository, so they are small: numbers have eight significant digits, the records of a curve are
written as columns, in which numbers have six, and what a run has in common with the one before, as its machine, is not
written again: its key is listed under `as_above`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

from crossbow_py.telemetry.records import write_atomically
from experiments.bench.machine import ROOT

EXPERIMENTS = ROOT / "experiments"
_DIGITS, _DIGITS_IN_COLUMNS = 8, 6
_AS_ABOVE, _WORTH_IT = "as_above", 40  # characters


def results_folder(experiment: str) -> Path:
    return EXPERIMENTS / experiment / "results"


def read_results(experiment: str) -> dict[str, dict[str, Any]]:
    """All results of an experiment by the name of their file, in the order of names."""
    return {path.stem: read_result(path) for path in sorted(results_folder(experiment).glob("*.json"))}


def read_result(path: Path) -> Any:
    result = json.loads(path.read_text(), object_hook=_records)
    for value in result.values() if isinstance(result, dict) else ():
        for before, record in pairwise(value) if isinstance(value, list) else ():
            for key in record.pop(_AS_ABOVE, ()) if isinstance(record, dict) else ():
                record[key] = before[key]
    return result


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a line for every key of a result, and one for every element of a list of objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}:{_lines(_compact(value))}" for key, value in result.items())
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    parts = value if isinstance(value, list) and any(isinstance(each, dict | list) for each in value) else ()
    if parts and all(isinstance(each, dict) for each in parts):
        parts = [parts[0], *starmap(_shortened, pairwise(parts))]
    texts = [_dumped(each) for each in parts or (value,)]
    return "[\n" + ",\n".join(texts) + "\n]" if parts else texts[0]


def _shortened(before: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a record has in common with the one before, if that saves much."""
    alike = [key for key, own in record.items() if own == before.get(key) and len(_dumped(own)) > _WORTH_IT]
    rest = {key: own for key, own in record.items() if key not in alike}
    return {**rest, _AS_ABOVE: alike} if alike else rest


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


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
