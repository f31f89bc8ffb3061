"""`trainer.model`: the current model at any time, before, between and after calls of `fit`, however they end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py import SMA, Independent, Listener, UserError
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.errors import LearnerError
from tests.support import linear_model
from tests.thinned import thinned
from tests.trainers import blobs, equal_states, image_trainer, make_trainer

RULES = [SMA(), SynchronousSGD(), SMA(average_ema=2.0), Independent()]


def stop_at(round_index, error):
    """An `after_round` that raises once so many rounds are submitted."""
    seen = []

    def after_round(_):
        seen.append(None)
        if len(seen) == round_index:
            raise error

    return after_round


def test_model_before_fit_is_the_initial_one_in_evaluation_mode_and_a_copy():
    trainer = make_trainer()
    model = trainer.model
    assert equal_states(model, linear_model()) and not model.training
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert equal_states(trainer.model, linear_model())
    assert equal_states(trainer.fit(max_epochs=1).model, make_trainer().fit(max_epochs=1).model)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.NAME)
def test_model_after_fit_is_that_of_the_result(rule):
    trainer = image_trainer(averaging=rule)
    result = trainer.fit(max_rounds=7)
    assert equal_states(trainer.model, result.model)
    again = trainer.fit(max_rounds=2)
    assert equal_states(trainer.model, again.model) and not equal_states(again.model, result.model)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.NAME)
@pytest.mark.parametrize("num_learners", thinned([1, 2], quick=[1], slow=[0]))
def test_model_after_ctrl_c_is_that_of_the_rounds_until_then(rule, num_learners):
    trainer = image_trainer(averaging=rule, num_learners=num_learners)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(max_epochs=9, after_round=stop_at(5, KeyboardInterrupt()))
    whole = image_trainer(averaging=rule, num_learners=num_learners).fit(max_rounds=5)
    assert equal_states(trainer.model, whole.model)
    assert trainer.evaluate().loss == whole.summary.test_loss


@pytest.mark.parametrize("executor", thinned(["threads", "fused"], quick=[0], slow=[1]))
def test_trainer_interrupted_beside_working_threads_has_a_model_and_trains_on(executor):
    trainer = image_trainer(executor=executor, num_learners=4)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(max_epochs=9, after_round=stop_at(3, KeyboardInterrupt()))
        assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    result = trainer.fit(max_epochs=9)
    assert (result.status, result.summary.epochs >= 9) == ("finished", True)
    assert equal_states(trainer.model, result.model)


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_model_is_there_after_an_error_of_the_model(executor):
    trainer = make_trainer(executor=executor, loss=FailsLater())
    with pytest.raises(LearnerError):
        trainer.fit(max_epochs=9)
    values = list(trainer.model.state_dict().values())
    assert values and all(value.isfinite().all() for value in values)


class FailsLater:
    """Cross-entropy that fails in training after a while."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += torch.is_grad_enabled()
        if self.calls > 40:
            raise RuntimeError("this loss fails")
        return nn.functional.cross_entropy(outputs, targets)


def test_callback_reads_the_model_at_the_end_of_an_epoch_and_is_refused_within_a_round():
    class Reads(Listener):
        def on_epoch(self, record):
            models.append(trainer.model)

    models: list[nn.Module] = []
    trainer = make_trainer(callbacks=[Reads()], test_data=blobs(30))
    result = trainer.fit(max_epochs=2)
    assert equal_states(models[0], make_trainer().fit(max_epochs=1).model)
    assert equal_states(models[1], result.model)
    with pytest.raises(UserError, match=r"cannot be read while a round is in flight; ask for it in Listener\.on_epoch"):
        trainer.fit(max_epochs=3, after_round=lambda _: print(trainer.model))
    assert trainer.model is not None
