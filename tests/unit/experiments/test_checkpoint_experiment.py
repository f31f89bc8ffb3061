"""What a checkpoint costs: figures worked out by hand, training that stands still when told to, a short measurement."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from experiments.checkpoint import run
from experiments.checkpoint.run import Training


def repetitions() -> list[dict[str, float]]:
    """Of 20 rounds a second: 100, 60 and 90 trained in 6 s of writing, in place of 120."""
    return [
        run.figures(rate=20.0, snapshot_s=0.5, write_s=6.0, rounds=rounds, still_s=still_s)
        for rounds, still_s in ((100, 4.0), (60, 7.0), (90, 5.0))
    ]


def result(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "model": "resnet50", "num_learners": 10, "beside": "resnet32", "batch_size": 16, "threads": 2, "gb": 2.25,
        "dropped": 4, **run.summary(found),
    }  # fmt: skip


def test_seconds_lost_are_those_of_the_copy_and_of_the_rounds_that_are_missing() -> None:
    figures = repetitions()[0]
    assert figures["slowed_s"] == 1.0  # 20 rounds are missing
    assert figures["beside_s"] == 1.5
    assert figures["write_rate"] == pytest.approx(100 / 6)


def test_summary_takes_medians_and_ratios_within_repetitions() -> None:
    found = run.summary(repetitions())
    assert found["n"] == 3
    assert found["figures"]["slowed_s"] == [1.5, 1.0, 3.0]
    assert found["figures"]["beside_s"] == [2.0, 1.5, 3.5]
    assert found["ratio"] == [0.4, 0.375, 0.5]
    assert found["period_s"] == {"beside": 100.0, "still": 250.0}  # for 2 s and 5 s of 2 %


def test_training_stands_still_when_it_is_paused_and_ends_with_its_block() -> None:
    training = Training("resnet20", 2)
    with training.running():
        while training.rounds < 2:
            time.sleep(0.01)
        training.pause()
        stood_at = training.rounds
        time.sleep(0.1)
        assert training.rounds == stood_at
        training.resume()
        while training.rounds == stood_at:
            time.sleep(0.01)


def test_measurement_from_the_command_line_writes_its_result(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(run, "MAX_FOREIGN_SHARE", 2.0)
    for name in ("_WINDOW_S", "_QUIET_S"):
        monkeypatch.setattr(run, name, 0.2)
    path = tmp_path / "small.json"
    arguments = ["--model", "resnet32", "--num-learners", "2", "--beside", "resnet20", "--threads", "1"]
    assert run.main([*arguments, "--seconds", "0.1", "--folder", str(tmp_path), "--json", str(path)]) == 0
    measured = json.loads(path.read_text())
    assert measured["n"] >= 1
    assert measured["figures"]["still_s"][0] > 0
    assert measured["gb"] > 0
    assert "training stands still" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
