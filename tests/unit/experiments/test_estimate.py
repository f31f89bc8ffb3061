"""The estimate experiment: tables and picture from made-up results, pairs worked out by hand, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.estimate import run, time_search
from experiments.estimate.run import SECONDS, WorkerLoad, best_pair, compare
from experiments.estimate.truth import SUBJECTS

GIB = 2**30


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
