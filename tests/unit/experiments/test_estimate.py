"""The estimate experiment: tables and picture from made-up results, pairs worked out by hand, and a short run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.machine import machine
from experiments.estimate import run, time_search
from experiments.estimate.recommended import SECONDS, WorkerLoad, best_pair, compare
from experiments.estimate.truth import SUBJECTS

GIB = 2**30


def cell(model: str, num_learners: int, limit_gib: int, true: int, estimated: int) -> dict[str, Any]:
    return {
        "model": model, "num_learners": num_learners, "at_once": num_learners, "limit_gib": limit_gib, "true": true,
        "estimated": estimated, "true_bytes": 1000 * true or None, "predicted_bytes": 1001 * true or None,
    }  # fmt: skip


def supply_row(host_gib: int, recommended: list[int], best: list[int]) -> dict[str, Any]:
    return {"model": "alexnet", "num_learners": 1, "host_gib": host_gib, "largest_batch": 300,
            "recommended": recommended, "best": best, "limits": ["device memory"]}  # fmt: skip


def estimate_result() -> dict[str, Any]:
    return {
        "machine": machine(), "precision": "fp32", "optimizer": "sgd with momentum", "search_gib": 16,
        "models": [
            {"model": "alexnet", "input_shape": [3, 224, 224], "num_values": 61_100_840,
             "activation_bytes_per_sample": 3 * 2**20},
            {"model": "vgg16", "input_shape": [3, 32, 32], "num_values": 14_986_698,
             "activation_bytes_per_sample": 2**21},
        ],
        "cells": [
            cell("alexnet", 1, 8, 0, 0), cell("alexnet", 1, 16, 400, 398), cell("alexnet", 2, 16, 200, 201),
            cell("vgg16", 1, 8, 50, 49), cell("vgg16", 1, 16, 100, 100),
        ],
        "supply": [supply_row(1, [100, 14], [100, 14]), supply_row(2, [200, 14], [201, 14])],
        "searches": [
            {"model": "alexnet", "way": "estimate", "seconds": [2.0, 1.0, 9.0], "batch_size": 398, "tries": 2,
             "processor_seconds": [1.0]},
            {"model": "alexnet", "way": "doubling", "seconds": [5.0, 4.0, 9.0], "batch_size": 400, "tries": 17,
             "processor_seconds": [4.0]},
        ],
        "command": {"arguments": ["-m", "crossbow_py.estimate"], "seconds": [7.0, 6.0, 6.5],
                    "processor_seconds": [5.0, 5.5, 6.0]},
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[value.strip() for value in line.strip("|").split("|")] for line in table.splitlines()]


def test_text_without_what_was_not_timed_has_the_other_tables() -> None:
    result = estimate_result() | {"searches": [], "command": None, "supply": []}
    assert run.result_text(result) == "\n\n".join(
        [run.errors_table(result), run.batch_sizes_table(result), run.notes(result)]
    )


def test_best_pair_has_as_many_workers_as_keep_up_and_the_largest_batch_they_can_hold() -> None:
    # A worker takes four times as long as the device: 4 workers, 12 batches of 1,000 bytes a sample.
    supply = WorkerLoad(sample_bytes=1000, fetch_s=0.04, step_s=0.01, num_learners=2)
    assert best_pair(supply, largest_batch=50, memory_bytes=2 * 12 * 1000 * 30) == (30, 4)
    assert best_pair(supply, largest_batch=20, memory_bytes=2 * 12 * 1000 * 30) == (20, 4)


def test_best_pair_is_none_where_no_workers_keep_up_or_none_has_room() -> None:
    assert best_pair(WorkerLoad(1000, fetch_s=1.0, step_s=0.01, num_learners=1), 10, GIB) is None
    assert best_pair(WorkerLoad(1000, fetch_s=0.01, step_s=0.01, num_learners=1), 10, 5999) is None


@pytest.mark.parametrize("memory_gib", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", list(SUBJECTS))
def test_recommended_pair_is_the_best_of_all(model: str, memory_gib: int) -> None:
    fetch_s, step_s = SECONDS[model]
    supply = WorkerLoad(SUBJECTS[model].sample_bytes, fetch_s, step_s, num_learners=2)
    found = compare(supply, 700, memory_gib * GIB)
    assert found["recommended"] == found["best"]


@pytest.mark.slow
def test_both_ways_to_search_find_the_same_batch_size() -> None:
    asked = {"model": "vgg16", "num_learners": 1, "limit_bytes": GIB}
    estimate, doubling = (time_search.main(json.dumps(asked | {"way": way})) for way in ("estimate", "doubling"))
    assert doubling["batch_size"] - 1 <= estimate["batch_size"] <= doubling["batch_size"]
    assert (estimate["tries"], doubling["tries"] > 8) == (2, True)


@pytest.mark.slow
def test_experiment_from_the_command_line_writes_its_result_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = tmp_path / "estimate_cpu.json"
    arguments = ["--models", "vgg16", "--num-learners", "2", "1", "--limits", "1", "2", "--repetitions", "0"]
    assert run.main([*arguments, "--json", str(written)]) == 0
    result = json.loads(written.read_text())
    found = [(one["num_learners"], one["at_once"], one["limit_gib"]) for one in result["cells"]]
    assert found == [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)]
    assert all(one["true"] - 1 <= one["estimated"] <= one["true"] for one in result["cells"])
    assert written.with_suffix(".png").stat().st_size > 5_000


def test_command_line_refuses_what_it_cannot_compare(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--num-learners", "0"], ["--models", "lenet"]):
        with pytest.raises(SystemExit) as ended:
            run.main(arguments)
        assert ended.value.code == 2
        assert arguments[0] in capsys.readouterr().err
