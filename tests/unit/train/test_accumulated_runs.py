"""Runs whose learners take several batches a step: what they count, say, refuse, and resume."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from crossbow_py import UserError
from crossbow_py.cli.configuration import from_plain
from crossbow_py.search.config import SearchConfig
from crossbow_py.telemetry.console import header_lines
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.run_settings import RunSettings, accumulates
from tests.trainers import Recorder, blobs, image_trainer, make_trainer, weights

GROUPS = ("mlp", "digits", "sgd", "constant")


def test_step_of_each_learner_takes_its_micro_batches_from_the_stream() -> None:
    run = make_trainer(accumulate=3, batch_size=2).run
    assert (run.samples_per_round, run.train_feed.batch_size) == (12, 6)
    assert plan_round(run, 0, 24, 1.0).starts == (24, 30)


def test_run_counts_the_samples_of_all_micro_batches(tmp_path: Any) -> None:
    heard = Recorder()
    trainer = make_trainer(accumulate=5, test_data=blobs(12), output_dir=tmp_path, callbacks=[heard])
    result = trainer.fit(max_epochs=10)
    assert trainer.state.samples_seen == 400
    assert trainer.state.round_index == 10
    assert result.test_accuracy == 1.0
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["train_accuracy"] == 1.0
    assert "2 learners of batch size 4 × 5 accumulated" in header_lines(heard.of("start")[0])[1]


def test_resumed_run_ends_with_the_bits_of_one_that_ran_through(tmp_path: Any) -> None:
    def trainer(name: str, resume: str | None = None) -> Any:
        return image_trainer(accumulate=3, batch_size=2, output_dir=tmp_path / name, resume=resume)

    trainer("whole").fit(max_rounds=9)
    trainer("parts").fit(max_rounds=4)
    trainer("parts", "auto").fit(max_rounds=5)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(UserError, match="accumulate: 3 → 2"):
        image_trainer(accumulate=2, batch_size=2, output_dir=tmp_path / "parts", resume="auto")


def test_batch_norm_over_micro_batches_is_said_once() -> None:
    said = "BatchNorm takes its statistics over micro-batches of 4, 2 times a step"
    assert [said in line for line in image_trainer(accumulate=2).run.warnings].count(True) == 1
    assert not any("micro-batches" in line for line in image_trainer().run.warnings)
    assert not any("micro-batches" in line for line in make_trainer(accumulate=2).run.warnings)


@pytest.mark.parametrize(
    ("accumulate", "refusal"),
    [
        (0, "accumulate must be at least 1, got 0"),
        (11, "accumulate=11 takes 44 samples a step .* at most accumulate=10"),
    ],
)
def test_steps_of_no_samples_or_more_than_there_are_are_refused(accumulate: int, refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        make_trainer(accumulate=accumulate)


def test_graphs_on_cuda_take_one_batch_a_step() -> None:
    settings, cuda = RunSettings(accumulate=2), torch.device("cuda")
    assert [accumulates(settings, name, cuda) for name in ("serial", "streams", "fused")] == [True, False, False]
    assert accumulates(settings, "fused", torch.device("cpu"))
    assert accumulates(RunSettings(), "fused", cuda)


def test_searches_have_no_accumulation() -> None:
    groups = {group: {"name": name} for group, name in zip(SearchConfig.GROUPS, GROUPS, strict=True)}
    with pytest.raises(UserError, match="unknown key accumulate"):
        from_plain({**groups, "accumulate": 2}, SearchConfig)
