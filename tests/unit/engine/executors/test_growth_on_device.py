"""Whole runs over recording devices whose memory holds two learners' graphs: the third learner is taken back."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerSettings, AutoTunerState, Decision
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from tests.recording_streams import RecordingStreams
from tests.trainers import blobs, change_run, make_trainer


class GrowsTo(LearnerTuning):
    """Adds a learner every sixth round, which is after graphs were captured, until memory says no."""

    def __init__(self, most):
        super().__init__(AutoTuner())
        self.most, self.rounds = most, 0

    def after_round(self, images, elapsed_s, noise=None):
        self.rounds += 1
        before = self.state.num_learners
        if self.rounds % 6 or before == self.most:
            return None
        self.state = AutoTunerState(num_learners=before + 1)
        return Decision("grow", before + 1, f"{before} → {before + 1}")

    def out_of_memory(self, noise=None):
        self.most = self.state.num_learners - 1
        self.state = AutoTunerState(num_learners=self.most)
        return Decision("shrink", self.most, "memory does not hold it")


class Limited(RecordingStreams):
    """Has memory for the graphs of two learners."""

    def __init__(self, num_learners):
        super().__init__()
        self.num_learners = num_learners

    def capture(self, name, body, stream, pool):
        if self.num_learners > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().capture(name, body, stream, pool)

    def count(self, word):
        return sum(word in entry.split() for entry in self.log)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StreamsExecutor, FusedExecutor])
def test_capture_that_dies_for_want_of_memory_takes_the_learner_away_and_training_goes_on(kind, monkeypatch):
    devices = []

    class OnDevice(kind):
        NAME, DEVICE, ORDER = "fused", None, "blocks"

        def __init__(self, tasks):
            devices.append(Limited(tasks.bank.num_learners))
            super().__init__(tasks, devices[-1])

    monkeypatch.setitem(EXECUTORS, "fused", OnDevice)
    trainer = make_trainer(
        num_learners="auto", executor="fused", train_data=blobs(240), test_data=blobs(30),
        auto_tuner=AutoTunerSettings(objective="throughput"),
    )  # fmt: skip
    change_run(trainer, tuning=GrowsTo(3))
    result = trainer.fit(max_epochs=3)
    assert [device.num_learners for device in devices] == [1, 2, 3, 2]
    assert result.summary.num_learners == 2
    assert result.test_accuracy >= 0.9
    # Every executor gave all of its graphs back.
    assert [device.count("capture") for device in devices] == [device.count("release") for device in devices]
    assert [device.count("capture") > 0 for device in devices] == [True, True, False, True]
