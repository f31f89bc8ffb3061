"""The auto-tuner tries no more learners than memory holds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import crossbow_py.train.tuning.learner_bound as learner_bound_module
from crossbow_py import Trainer
from crossbow_py.core.measured import Remembered
from tests.trainers import Recorder, make_trainer


def wide_model() -> nn.Module:
    """4,000 + 4,000 · 250 + 250 · 3 parameters in round numbers, without biases: 1,016,750 of them."""
    return nn.Sequential(
        nn.Linear(4, 4000, bias=False), nn.ReLU(), nn.Linear(4000, 250, bias=False), nn.Linear(250, 3, bias=False)
    )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(Remembered, "path", tmp_path / "activations.json")

    def make(free_bytes: float, **options: Any) -> Trainer:
        monkeypatch.setattr(learner_bound_module, "free_bytes", lambda device: free_bytes)
        return make_trainer(**{"model": wide_model, "num_learners": "auto", **options})

    return make


def most_of(trainer: Trainer) -> int:
    assert trainer.run.tuning is not None
    return trainer.run.tuning.tuner.max_learners


def test_ample_memory_leaves_the_limit_as_it_was_set(trainer):
    assert most_of(trainer(2**34)) == 8
    assert most_of(trainer(2**34, max_learners=5)) == 5


def test_scarce_memory_lowers_it_and_says_so(trainer):
    # A learner has weights, gradients, corrections and momentum of 4.07 MB each, and makes a gradient beside them when
    # at work: 16.3 MB and 4.1. Three rows of z and the template are 16.3. With serial, K of them take 20 + 16.3 K.
    recorder = Recorder()
    bounded = trainer(80e6 / 0.9, callbacks=[recorder])
    assert most_of(bounded) == 3
    bounded.fit(max_epochs=1)
    assert "Memory holds about 3 of at most 8 learners; no more are tried." in recorder.of("message")


def test_one_learner_is_always_allowed(trainer):
    assert most_of(trainer(1e6)) == 1


def test_fixed_number_of_learners_is_not_touched(trainer):
    assert trainer(1e6, num_learners=4).run.bank.num_learners == 4


class Opaque(nn.Module):
    """Looks at a value, which fake tensors have not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if float(x.sum()) > 0 else 0.5
        return self.layer(x) * scale


def test_model_that_cannot_be_probed_is_not_bounded(trainer):
    recorder = Recorder()
    unbounded = trainer(1e3, model=Opaque, callbacks=[recorder])
    assert most_of(unbounded) == 8
    unbounded.fit(max_epochs=1)
    assert any("How many learners memory holds is not known" in message for message in recorder.of("message"))


def test_probe_that_fails_in_any_way_bounds_nothing_and_ends_no_run(trainer, monkeypatch):
    def fail(*_: Any) -> int:
        raise AttributeError("no such\nbook")

    monkeypatch.setattr("crossbow_py.engine.sizing.bound._probed", fail)
    recorder = Recorder()
    unbounded = trainer(1e3, callbacks=[recorder])
    assert most_of(unbounded) == 8
    unbounded.fit(max_epochs=1)
    assert "How many learners memory holds is not known: AttributeError: no such book" in recorder.of("message")
