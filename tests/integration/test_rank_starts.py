"""What several ranks begin with is alike on all of them, or they do not begin; and what they leave is of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossbow_py import SMA
from tests import rank_jobs
from tests.rank_jobs import assert_alike, distance, results
from tests.ranks import Raised, on_ranks


def test_model_that_is_another_on_every_rank_begins_as_that_of_the_first():
    options = {"model": rank_jobs.model_of_this_process, "executor": "serial"}
    found = results(rank_jobs.restore_and_train, 2, options, {"max_rounds": 3})
    assert_alike([begun for begun, _ in found])
    assert_alike([after for _, after in found])
    assert np.allclose(found[0][0].z[:24], 1.0)  # rank 0 draws ones, rank 1 twos
    assert found[0][0].learners[0].tobytes() == found[1][0].learners[1].tobytes()


@pytest.mark.slow
def test_average_models_of_nodes_are_taken_up_where_the_nodes_are_as_they_were(tmp_path):
    options: dict[str, Any] = {"executor": "serial", "averaging": SMA(node_period=50), "output_dir": tmp_path / "first"}
    before = results(rank_jobs.train, 2, options, {"max_rounds": 6, "max_samples": 320}, num_nodes=2)
    assert distance(before[0].z, before[1].z) > 1e-6
    assert any("averaging.node_period=50 is longer than the run" in message for message in before[0].messages)
    mean = (before[0].z + before[1].z) / 2
    for num_nodes in (2, 1):
        resumed = {**options, "resume": tmp_path / "first", "output_dir": tmp_path / f"on {num_nodes}"}
        found = results(rank_jobs.restore_and_train, 2, resumed, {"max_rounds": 2}, num_nodes=num_nodes)
        for was, (begun, _) in zip(before, found, strict=True):
            assert begun.z.tobytes() == (was.z if num_nodes == 2 else mean).tobytes()
            assert [row.tobytes() for row in begun.learners] == [row.tobytes() for row in was.learners]
    assert_alike([after for _, after in found])


@pytest.mark.slow
def test_model_that_cannot_be_written_is_the_error_of_all_ranks(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model.safetensors" / "file").touch()
    found = on_ranks(rank_jobs.train, 2, {"executor": "serial", "output_dir": tmp_path}, {"max_rounds": 2})
    assert [each.kind for each in found if isinstance(each, Raised)] == ["UserError", "RankError"]
    for each in found:
        assert f"cannot write {tmp_path / 'model.safetensors'}" in each.text
        assert each.exit_code == 2


@pytest.mark.slow
def test_listener_of_the_first_rank_is_called_there_and_its_refusal_is_the_error_of_all_ranks():
    first, second = on_ranks(rank_jobs.train_recorded, 2, False)
    assert (first[0], first[-1], second) == ("start", "close", [])
    found = on_ranks(rank_jobs.train_recorded, 2, True)
    assert [each.kind for each in found] == ["UserError", "RankError"]
    assert [each.exit_code for each in found] == [2, 2]
    for each in found:
        assert "the server does not answer; start it." in each.text


def test_ranks_that_would_train_in_other_precisions_are_refused():
    first, second = on_ranks(rank_jobs.choose_apart, 2)
    assert "rank 1 would not train as rank 0 does (precision: fp32 → bf16)" in first.text
    assert first.text in second.text
    assert (first.exit_code, second.exit_code) == (2, 2)
