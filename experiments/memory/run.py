"""What memory do K learners need, and what does one more cost?

    python experiments/memory/run.py [--device cpu|cuda] [--json PATH]

README.md says what is counted. The picture is drawn beside the results file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.engine.modules.precision import choose_device, choose_precision
from crossbow_py.engine.sizing.memory import LearnerBytes, learner_bytes, predicted_bytes
from crossbow_py.models import MODELS
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.rounds import ExecutorName, Setup
from experiments.tables.markdown import NONE, columns_table, markdown_table

Result = Mapping[str, Any]
Row = Mapping[str, Any]
_MIB = 2**20
_PARTS = ("weights", "gradients", "corrections", "state", "shadow", "buffers", "activations")
EXECUTORS: dict[str, tuple[ExecutorName, ...]] = {"cpu": ("fused", "serial"), "cuda": ("fused", "streams")}
# Kineto otherwise says on stderr that it starts and stops.
_QUIET = {"KINETO_LOG_LEVEL": "6"}
_MEASURE = Path(__file__).with_name("measure.py")


class MeasurementError(Exception):
    """A measuring process failed; the message is the last line it wrote."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--device", written="write the results there, and draw them beside it")
    add = parser.add_argument
    names = [name for name in MODELS if name != "custom"]
    add("--models", choices=names, nargs="+", default=("lenet", "resnet32", "vgg16"),
        help="default lenet resnet32 vgg16")  # fmt: skip
    add("--num-learners", type=count, nargs="+", default=(1, 2, 4, 8, 16), help="K (default 1 2 4 8 16)")
    add("--batch-size", type=count, default=16, help="images a learner takes (default %(default)s)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="default %(default)s")
    return measure_and_write(parser, argv, measure_models, result_text, "memory")


def measure_models(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    precision = choose_precision(given.precision, device).name
    result: dict[str, Any] = {
        "device": device.type, "precision": precision, "batch_size": given.batch_size, "models": [], "rows": [],
    }  # fmt: skip
    for model in dict.fromkeys(given.models):
        setup = Setup(model, given.batch_size, 1, "serial", device.type, precision)  # type: ignore[arg-type]
        measure_model(setup, sorted(set(given.num_learners)), result)
    return result


def measure_model(setup: Setup, num_learners: Sequence[int], result: dict[str, Any]) -> None:
    """Append a model's entry and its rows; what fails is a row with the reason and without a number."""
    probed = measure({**asdict(setup), "probe": True})
    precision = choose_precision(setup.precision, choose_device(setup.device))
    own = learner_bytes(
        probed["num_values"], probed["num_buffer_values"], probed["num_states"],
        master_bytes=precision.master.itemsize, compute_bytes=precision.compute.itemsize,
        activations=probed["activation_bytes"],
    )  # fmt: skip
    result["models"].append({"model": setup.model, "num_values": probed["num_values"], "learner": asdict(own)})
    for executor in EXECUTORS[setup.device]:
        for learners in num_learners:
            asked = {**asdict(setup), "executor": executor, "num_learners": learners}
            row: dict[str, Any] = {"model": setup.model, "executor": executor, "num_learners": learners}
            try:
                row |= with_prediction(measure(asked), own, learners, executor)
            except MeasurementError as error:
                row |= {"measured_bytes": None, "predicted_bytes": None, "failure": str(error)}
            result["rows"].append(row)
            print(f"{setup.model} {executor} K={learners}: {row.get('failure') or row['measured_bytes']}", flush=True)


def with_prediction(measured: Mapping[str, int], own: LearnerBytes, num_learners: int, executor: str) -> dict[str, int]:
    at_once = 1 if executor == "serial" else num_learners
    return {
        **measured,
        "predicted_bytes": predicted_bytes(own, num_learners, at_once=at_once, fixed=measured["fixed_bytes"]),
    }


def measure(asked: Mapping[str, Any]) -> dict[str, int]:
    """Run measure.py in a fresh process. Raises MeasurementError."""
    done = subprocess.run(
        [sys.executable, str(_MEASURE), json.dumps(asked)],
        cwd=ROOT, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MeasurementError(lines[-1] if lines else f"it ended with code {done.returncode}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def result_text(result: Result) -> str:
    failures = [f"{_name(row)} failed: {row['failure']}" for row in result["rows"] if row.get("failure")]
    return "\n\n".join([parts_table(result), peaks_table(result), *failures])


def parts_table(result: Result) -> str:
    header = ["one learner, MiB", "parameters", *_PARTS, "all of it"]
    rows = []
    for entry in result["models"]:
        parts = [_mib(entry["learner"][part], digits=2) for part in _PARTS]
        whole = _mib(LearnerBytes(**entry["learner"]).whole, digits=2)
        rows.append([entry["model"], f"{entry['num_values']:,}", *parts, whole])
    return markdown_table(header, rows)


def peaks_table(result: Result) -> str:
    def over_predicted(row: Row) -> str:
        return NONE if row["measured_bytes"] is None else f"{row['measured_bytes'] / row['predicted_bytes']:.3f}"

    def over_own(row: Row) -> str:
        extra = extra_learner_bytes(result, row)
        return NONE if extra is None else f"{extra / whole_bytes(result, row['model']):.3f}"

    return columns_table(result["rows"], {
        "model": "model", "executor": "executor", "K": "num_learners",
        "measured, MiB": lambda row: _mib(row["measured_bytes"]),
        "predicted, MiB": lambda row: _mib(row["predicted_bytes"]),
        "measured ÷ predicted": over_predicted,
        "an extra learner, MiB": lambda row: _mib(extra_learner_bytes(result, row)), "÷ its own": over_own,
    })  # fmt: skip


def extra_learner_bytes(result: Result, row: Row) -> float | None:
    """The bytes of each learner added since the next smaller K; None for the smallest."""
    before = [other for other in rows_of(result, row["model"], row["executor"])
              if other["num_learners"] < row["num_learners"]]  # fmt: skip
    if row["measured_bytes"] is None or not before:
        return None
    grown = row["measured_bytes"] - before[-1]["measured_bytes"]
    return float(grown / (row["num_learners"] - before[-1]["num_learners"]))


def whole_bytes(result: Result, model: str) -> int:
    return next(LearnerBytes(**entry["learner"]).whole for entry in result["models"] if entry["model"] == model)


def rows_of(result: Result, model: str, executor: str) -> Sequence[Row]:
    rows = [row for row in result["rows"] if row["model"] == model and row["executor"] == executor]
    return sorted((row for row in rows if row["measured_bytes"] is not None), key=lambda row: int(row["num_learners"]))


def _name(row: Row) -> str:
    return f"{row['model']} {row['executor']} K={row['num_learners']}"


def _mib(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value / _MIB:,.{digits}f}"


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
