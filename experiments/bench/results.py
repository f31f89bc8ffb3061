"""Results files: one JSON object each, in the `results` folder beside the script that wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crossbow_py.telemetry.records import write_atomically
from experiments.bench.machine import ROOT, machine_line

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
    """Print a result, and write its file if there is to be one."""
    print(f"\n{text(result)}\n\n{machine_line(result['machine'])}")
    if path:
        write_result(path, result)
        print(f"written to {path}")
