"""Graphs repeat what forward found when they were made: a run notices when the model has gone on without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py import SMA, Independent, Listener
from tests.thinned import pairs
from tests.trainers import Recorder, equal_states, image_model, images, make_trainer


class Tempered(nn.Module):
    """Its temperature lies outside, as a callback's does."""

    outside = {"temperature": 1.0}  # noqa: RUF012  looked at by nobody who looks for what forward changes

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 3), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.linear(x)) / self.outside["temperature"]


class Anneals(Listener):
    def on_epoch(self, record):
        Tempered.outside["temperature"] = 3.0


@pytest.fixture(autouse=True)
def _one_degree():
    yield
    Tempered.outside["temperature"] = 1.0


@pytest.mark.parametrize(
    ("executor", "rule", "precision"), pairs(["fused", "fused_threads"], [SMA(), Independent()], ["fp32", "bf16"])
)
def test_temperature_that_a_callback_changes_is_noticed_after_an_epoch(executor, rule, precision):
    recorder = Recorder()
    make_trainer(
        model=Tempered, executor=executor, averaging=rule, precision=precision, callbacks=[Anneals(), recorder]
    ).fit(max_epochs=4)  # fmt: skip
    said = [line for line in recorder.of("message") if "gives other numbers than the model itself by now" in line]
    assert len(said) >= 1
    assert "executor=threads or serial" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("executor", ["fused", "fused_threads"])
def test_graph_that_goes_on_to_agree_is_not_spoken_of_and_training_does_not_notice(executor, precision, monkeypatch):
    def trained():
        recorder = Recorder()
        data = {"train_data": images(60), "precision": precision, "executor": executor, "callbacks": [recorder]}
        result = make_trainer(model=image_model, **data).fit(max_epochs=4)
        assert not [line for line in recorder.of("message") if "by now" in line]
        return result.model

    compared = trained()
    monkeypatch.setattr("crossbow_py.train.loop.learners.Learners.recheck", lambda self: None)
    assert equal_states(compared, trained())


def test_numbers_of_torchs_generator_are_not_used_up():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    make_trainer(model=Tempered, executor="fused").fit(max_epochs=1)
    assert torch.equal(before, torch.random.get_rng_state())
