"""The arguments of `Trainer`: declared once, typed, and refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import traceback
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import nn

from crossbow_py import AdamW, Trainer, UserError
from crossbow_py.averaging import Crossbow
from crossbow_py.schedules import Cosine
from crossbow_py.train.arguments import TrainArguments
from crossbow_py.train.config import JobConfig, TrainConfig
from crossbow_py.train.run_settings import JobOptions, RunOptions, RunSettings
from tests.trainers import blobs, make_trainer

# The groups of the command line, which Python gives as objects, and what it gives in another form.
OTHERWISE = {"model", "optimizer", "schedule", "averaging", "metrics"}


def test_trainer_has_a_keyword_for_every_key_with_its_default():
    parameters = inspect.signature(Trainer).parameters
    for field in itertools.chain(*map(dataclasses.fields, (RunSettings, RunOptions, JobOptions))):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY


def test_no_key_is_declared_both_for_the_command_line_and_for_python():
    own = set(TrainConfig.__annotations__) | set(JobConfig.__annotations__)
    assert own & set(TrainArguments.__annotations__) == OTHERWISE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Trainer(train_data=blobs(8)), "missing a required argument: 'model'"),
        (lambda: Trainer(nn.Linear, blobs(8), blobs(8), 3), "too many positional arguments"),
        (lambda: Trainer(model=nn.Linear, train_data=blobs(8), batchsize=3), "did you mean 'batch_size'"),
    ],
)
def test_what_trainer_does_not_take_is_a_type_error(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_step_is_six_calls_deep(monkeypatch):
    trainer, stacks = make_trainer(), []
    correct = type(trainer.run.update).correct

    def seen(self, *arguments):
        stacks.append([frame.name for frame in traceback.extract_stack()])
        return correct(self, *arguments)

    monkeypatch.setattr(type(trainer.run.update), "correct", seen)
    trainer.fit(max_rounds=1)
    calls = stacks[0]
    assert calls[calls.index("step") :] == ["step", "submit", "_start", "run_task", "correct", "seen"]


def test_groups_may_be_named_and_arrays_of_numpy_are_data() -> None:
    inputs, targets = (each.numpy() for each in blobs(24))
    data = inputs.astype(np.float64), targets
    settings: dict[str, Any] = {"executor": "serial", "num_learners": 2, "device": "cpu", "batch_size": 4}
    named = Trainer(
        model=partial(nn.Linear, 4, 3), train_data=data, test_data=data, optimizer="adamw", schedule="cosine",
        averaging="crossbow", **settings,
    ).fit(max_epochs=2)  # fmt: skip
    made = Trainer(
        model=partial(nn.Linear, 4, 3), train_data=blobs(24), test_data=blobs(24), optimizer=AdamW(), schedule=Cosine(),
        averaging=Crossbow(), **settings,
    ).fit(max_epochs=2)  # fmt: skip
    assert named.test_loss == made.test_loss is not None
    assert [entry["test_loss"] for entry in named.history] == [entry["test_loss"] for entry in made.history]
    assert named.history[-1]["epoch"] == 2 and named.history[-1]["test_loss"] == named.test_loss
    assert len(repr(named).splitlines()) == 4 and repr(named).startswith("Result: finished (max_epochs)")
    with pytest.raises(UserError, match="optimizer has no 'adam'; did you mean 'adamw'?"):
        Trainer(model=partial(nn.Linear, 4, 3), train_data=data, optimizer="adam")
