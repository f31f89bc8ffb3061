"""The profile of operators: of all threads, from the first rounds on, over by itself."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py import Trainer, UserError
from crossbow_py.telemetry.profile import OperatorProfile
from tests.trainers import blobs, image_model


class Learner(threading.Thread):
    """Multiplies matrices until it is told to stop, as a thread that ran before the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()

    def run(self) -> None:
        matrix = torch.ones(8, 8)
        while not self.stopped.wait(0.001):
            torch.mm(matrix, matrix)


def test_profile_has_the_operators_of_all_threads_and_ends_by_itself(
    tmp_path: Path, events: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    profile, learner = OperatorProfile(tmp_path), Learner()
    learner.start()
    try:
        profile.on_start(events.run_info())
        for tenth in range(20):
            torch.ones(4).add_(1)
            profile.on_progress(events.progress(tenth, elapsed_s=tenth / 10))
            learner.stopped.wait(0.01)
    finally:
        learner.stopped.set()
        learner.join()
    (note,) = profile.take_notes()
    assert note.startswith("Profiled 0.5 s of training: aten::")
    profile.on_end(events.summary())
    profile.close()
    assert profile.take_notes() == []
    table = (tmp_path / "profile.txt").read_text()
    assert "aten::mm" in table
    assert "aten::add_" in table
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::add_"} <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json.gz", "profile.txt"]
    assert capfd.readouterr().err == ""


def test_profile_of_a_run_that_was_over_at_once_says_so(tmp_path: Path, events: Any) -> None:
    profile = OperatorProfile(tmp_path)
    profile.on_start(events.run_info())
    profile.on_progress(events.progress(1, elapsed_s=0.1))
    profile.on_end(events.summary())
    profile.close()
    (note,) = profile.take_notes()
    assert note.startswith("No profile")
    assert list(tmp_path.iterdir()) == []


def test_profile_without_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match="profile writes into the run's folder"):
        Trainer(model=image_model, train_data=blobs(8), profile=True)
