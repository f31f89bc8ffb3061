"""Does the estimator find the largest batch size that fits, how fast, and the workers that feed it?

    python experiments/estimate/run.py [--json PATH]

README.md says what is compared. Nothing needs a GPU. The picture is drawn beside the results file.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.engine.sizing.memory import LearnerModel
from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import ROOT, machine
from experiments.bench.results import show_and_write
from experiments.estimate.recommended import SECONDS, WorkerLoad, compare, estimate
from experiments.estimate.report import result_text
from experiments.estimate.truth import SUBJECTS, Subject, TrainingRun
from experiments.tables.drawing import draw_after

GIB = 2**30
LIMITS_GIB = (2, 4, 8, 16, 32)
NUM_LEARNERS = (1, 2, 4)
HOST_GIB = (1, 2, 4, 8, 16)
SEARCH_GIB = 16  # the limit of the searches that are timed, and of the workers' batch sizes
WAYS = ("estimate", "doubling")
COMMAND = ("-m", "crossbow_py.estimate", "+experiment=resnet50", "memory=16GiB")
_TIME_SEARCH = Path(__file__).with_name("time_search.py")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    result: dict[str, Any] = {
        "machine": machine(), "precision": "fp32", "optimizer": "sgd with momentum", "search_gib": SEARCH_GIB,
        "models": [], "cells": [], "supply": [], "searches": [], "command": None,
    }  # fmt: skip
    for model in dict.fromkeys(options.models):
        compare_model(SUBJECTS[model], sorted(set(options.num_learners)), sorted(set(options.limits)), result)
    if options.repetitions:
        result["searches"] = time_searches(list(dict.fromkeys(options.models)), options.repetitions)
        result["command"] = time_command(options.command_repetitions)
    show_and_write(result, result_text, options.json)
    if options.json:
        draw_after("estimate", options.json)
    return 0


def compare_model(
    subject: Subject, num_learners: Sequence[int], limits_gib: Sequence[int], result: dict[str, Any]
) -> None:
    """Append a model's entry, its cells and, for K = 1 and the largest, what feeds it."""
    model = estimate(subject)
    result["models"].append({
        "model": subject.model,
        "input_shape": list(subject.input_shape),
        "num_values": model.sizes.num_values,
        "activation_bytes_per_sample": model.activations.per_sample,
    })  # fmt: skip
    for learners in num_learners:
        for at_once in sorted({1, learners}):
            run = TrainingRun(subject, learners, at_once)
            cells = [compare_cell(model, run, gib) for gib in limits_gib]
            result["cells"] += cells
            if at_once == learners and learners in {num_learners[0], num_learners[-1]}:
                result["supply"] += compare_workers(subject, learners, run.largest_batch_size(SEARCH_GIB * GIB))
            shown = ", ".join(f"{cell['limit_gib']} GiB {cell['true']}/{cell['estimated']}" for cell in cells)
            print(f"{subject.model} K={learners}, {at_once} at once, true/estimated: {shown}", flush=True)


def compare_cell(model: LearnerModel, run: TrainingRun, limit_gib: int) -> dict[str, Any]:
    """The largest batch size as it is and as it is estimated; and the bytes of the true one, both ways."""
    limit = limit_gib * GIB
    true = run.largest_batch_size(limit)
    return {
        "model": run.subject.model,
        "num_learners": run.num_learners,
        "at_once": run.at_once,
        "limit_gib": limit_gib,
        "true": true,
        "estimated": model.largest_batch_size(limit, run.num_learners, run.at_once),
        "true_bytes": run.peak_bytes(true) if true else None,
        "predicted_bytes": model.predicted_bytes(true, run.num_learners, run.at_once) if true else None,
    }


def compare_workers(subject: Subject, num_learners: int, largest_batch: int) -> list[dict[str, Any]]:
    """Batch size and workers for every size of the host's memory; nothing where no batch fits on the device."""
    fetch_s, step_s = SECONDS[subject.model]
    load = WorkerLoad(subject.sample_bytes, fetch_s, step_s, num_learners)
    about = {"model": subject.model, "num_learners": num_learners}
    return [
        {**about, "host_gib": gib, **compare(load, largest_batch, gib * GIB)} for gib in HOST_GIB if largest_batch
    ]


def time_searches(models: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {
        (model, way): {"model": model, "way": way, "seconds": [], "processor_seconds": []}
        for model in models
        for way in WAYS
    }
    for _ in range(repetitions):
        for (model, way), entry in found.items():
            asked = {"model": model, "num_learners": 1, "limit_bytes": SEARCH_GIB * GIB, "way": way}
            answer = json.loads(_output_of([str(_TIME_SEARCH), json.dumps(asked)]).splitlines()[-1])
            entry["seconds"].append(answer.pop("seconds"))
            entry["processor_seconds"].append(answer.pop("processor_seconds"))
            entry.update(answer)
            print(f"{model} {way}: {answer['batch_size']} in {entry['seconds'][-1]:.1f} s", flush=True)
    return list(found.values())


def time_command(repetitions: int) -> dict[str, Any]:
    """Seconds of the whole command, from the start of Python to its end, by the clock and of processors."""
    seconds, busy_s = [], []
    for _ in range(repetitions):
        begin, busy = time.perf_counter(), _children_s()
        _output_of(COMMAND)
        seconds.append(time.perf_counter() - begin)
        busy_s.append(_children_s() - busy)
    return {"arguments": list(COMMAND), "seconds": seconds, "processor_seconds": busy_s}


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _output_of(arguments: Sequence[str]) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, "write the results there, and draw them beside it")
    add = parser.add_argument
    add("--models", choices=list(SUBJECTS), nargs="+", default=list(SUBJECTS), help="default: all")
    add("--num-learners", type=count, nargs="+", default=NUM_LEARNERS, help="K (default 1 2 4)")
    add("--limits", type=count, nargs="+", default=LIMITS_GIB, metavar="GIB", help="default 2 4 8 16 32")
    add("--repetitions", type=int, default=3, help="of timed searches; 0 times nothing (default %(default)s)")
    add("--command-repetitions", type=count, default=5, help="of the timed command (default %(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
