"""Messages of a trainer: each once, however often `fit` is called."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from crossbow_py import SMA
from tests.support import linear_model
from tests.trainers import Recorder, blobs, make_trainer


class Sorts(nn.Module):
    """Has an operator that no rule fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.logcumsumexp(self.linear(inputs), dim=1)


def test_what_an_executor_says_is_not_said_again_by_the_next_fit() -> None:
    recorder = Recorder()
    trainer = make_trainer(model=Sorts, executor="fused", callbacks=[recorder], test_data=blobs(30))
    trainer.fit(max_epochs=1)
    said = recorder.of("message")
    assert any("Operators run learner by learner" in message for message in said)
    trainer.find_learning_rate(num_rounds=10)
    trainer.fit(max_epochs=2)
    trainer.fit(max_epochs=3)
    assert recorder.of("message") == said


def test_remark_on_a_run_is_made_once_and_another_one_when_it_comes_up() -> None:
    recorder = Recorder()
    trainer = make_trainer(averaging=SMA(averaging_period=7), callbacks=[recorder])
    for rounds in (5, 5, 6, 5):
        trainer.fit(max_samples=8 * rounds)
    counts = Counter(message for message in recorder.of("message") if "averaging_period=7 is longer" in message)
    assert sorted(counts.values()) == [1, 1]


def test_range_test_before_fit_swallows_no_message() -> None:
    first, second = Recorder(), Recorder()
    tested = make_trainer(model=Sorts, executor="fused", callbacks=[first])
    tested.find_learning_rate(num_rounds=10)
    tested.fit(max_epochs=1)
    make_trainer(model=Sorts, executor="fused", callbacks=[second]).fit(max_epochs=1)
    assert first.of("message") == second.of("message") != []
