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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import choose_device, choose_precision
from crossbow_py.engine.sizing.memory import LearnerBytes, learner_bytes, predicted_bytes
from crossbow_py.models import MODELS
from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import ROOT, machine
from experiments.bench.results import show_and_write
from experiments.bench.rounds import ExecutorName, Setup
from experiments.memory.report import result_text
from experiments.tables.drawing import draw_after

DEFAULT_MODELS = ("lenet", "resnet32", "vgg16")
NUM_LEARNERS = (1, 2, 4, 8, 16)
BATCH_SIZE = 16
EXECUTORS: dict[str, tuple[ExecutorName, ...]] = {"cpu": ("fused", "serial"), "cuda": ("fused", "streams")}
# Kineto otherwise says on stderr that it starts and stops.
_QUIET = {"KINETO_LOG_LEVEL": "6"}
_MEASURE = Path(__file__).with_name("measure.py")


class MeasurementError(Exception):
    """A measuring process failed; the message is the last line it wrote."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        device = choose_device(options.device)
        precision = choose_precision(options.precision, device).name
    except UserError as error:
        parser.error(str(error))
    result: dict[str, Any] = {
        "machine": machine(), "device": device.type, "precision": precision, "batch_size": options.batch_size,
        "models": [], "rows": [],
    }  # fmt: skip
    for model in dict.fromkeys(options.models):
        setup = Setup(model, options.batch_size, 1, "serial", device.type, precision)  # type: ignore[arg-type]
        measure_model(setup, sorted(set(options.num_learners)), result)
    show_and_write(result, result_text, options.json)
    if options.json:
        draw_after("memory", options.json)
    return 0


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


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, "write the results there, and draw them beside it")
    add = parser.add_argument
    names = [name for name in MODELS if name != "custom"]
    add("--models", choices=names, nargs="+", default=DEFAULT_MODELS, help=f"default {' '.join(DEFAULT_MODELS)}")
    add("--num-learners", type=count, nargs="+", default=NUM_LEARNERS, help="K (default 1 2 4 8 16)")
    add("--batch-size", type=count, default=BATCH_SIZE, help="images a learner takes (default %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="default %(default)s")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
