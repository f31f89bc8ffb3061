"""Choices, the model factory, the probe before training, and each learner's batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.train.checks.probe import probe
from crossbow_py.train.checks.seeded_model import seeded_model
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.run_settings import RunSettings, choose
from tests.support import CPU, features
from tests.trainers import image_model, images, make_trainer

BATCH = Batch(*features(2))


def cross_entropy(output, targets):
    return nn.functional.cross_entropy(output, targets)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        return nn.functional.dropout(self.linear(inputs), 0.5, self.training)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": "16"}, "batch_size must be a whole number, got '16'"),
        ({"num_learners": 0}, "num_learners must be at least 1, got 0"),
        ({"num_learners": True}, "num_learners must be a whole number or one of auto, seesaw, got True"),
        ({"executor": "stream"}, "executor must be one of auto, serial, threads, fused, .*, streams, got 'stream'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"precision": "fp16"}, "precision must be one of auto, fp32, bf16, got 'fp16'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of stop, reseed, got 'ignore'"),
    ],
)
def test_run_settings_that_cannot_be_are_refused_in_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        RunSettings(**options)


def test_choose_takes_what_a_checkpoint_says_only_where_auto_is_asked_for():
    saved = {"precision": "bf16", "executor": "serial"}
    kept = choose(RunSettings(device="cpu"), saved)
    assert (kept.executor, kept.precision, kept.device) == ("serial", BF16, CPU)
    asked = choose(RunSettings(device="cpu", executor="threads", precision="fp32"), saved)
    assert (asked.executor, asked.precision) == ("threads", FP32)
    assert choose(RunSettings(device="cpu"), None).executor == "auto"  # to be measured
    assert choose(RunSettings(device="cpu", num_learners=1), None).executor == "serial"


def test_seeded_model_follows_from_the_seed_and_leaves_torchs_generator_alone():
    def make():
        return nn.Linear(4, 3)

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = seeded_model(make, 0, None)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(seeded_model(make, 0, None).weight, one.weight)
    assert not torch.equal(seeded_model(make, 1, None).weight, one.weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 3), "model must be a function that returns an nn.Module, got Linear; give the class itself"),
        ("lenet", "model must be a function that returns an nn.Module, got str"),
        (lambda: 3, "model must be a function that returns an nn.Module, got int from it; have it return the model"),
        (nn.Flatten, "the model has no parameter to train"),
        (lambda: nn.LazyLinear(3), r"the model's weight has no shape yet, .*: model\(torch.zeros\(2, \.\.\.\)\)"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 3)), "0.running_mean has no shape yet"),
    ],
)
def test_model_that_is_no_function_of_a_trainable_module_is_refused(model, message):
    with pytest.raises(UserError, match=message):
        seeded_model(model, 0, None)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear(5, 3), cross_entropy, r"inputs of shape \[4\] and dtype torch.float32 \(RuntimeError"),
        (nn.GRU(4, 3), nn.functional.cross_entropy, "of which the loss takes one tensor; call it logits"),
        (nn.Linear(4, 2), cross_entropy, r"shape \[batch, 2\] and the data has 3 classes, 0 to 2; its last layer"),
        (nn.Unflatten(1, (2, 2)), cross_entropy, r"output has shape \[batch, 2, 2\] and the data has 3 classes"),
        (nn.Linear(4, 3), nn.functional.mse_loss, r"the loss cannot take .* output \[2, 3\] with targets \[2\]"),
        (nn.Linear(4, 3), lambda output, _: output.mean(1), r"the loss must return one number.* got \[2\]"),
        (nn.Linear(4, 3), lambda output, _: output.mean().item(), "the loss must return one number.* got float"),
        (nn.Linear(4, 3), lambda output, _: output.detach().mean(), "the loss does not depend on the parameters"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_probe_refuses_what_cannot_train_in_one_sentence(model, loss, message):
    with pytest.raises(UserError, match=message) as caught:
        probe(model, FP32, BATCH, loss, num_classes=3)
    assert "\n" not in str(caught.value)


def test_probe_of_a_class_for_each_place_wants_scores_in_the_second_dimension():
    batch = Batch(torch.ones(2, 4, 5), torch.tensor([[0, 1, 2, 0, 1], [2, 0, 1, 2, 0]]))
    assert probe(nn.Conv1d(4, 3, 1), FP32, batch, nn.functional.cross_entropy, num_classes=3) == []
    with pytest.raises(UserError, match=r"shape \[batch, 4, 5\] .* 3 classes, 0 to 2; .* return \[batch, 3, 5\]"):
        probe(nn.Conv1d(4, 4, 1), FP32, batch, nn.functional.cross_entropy, num_classes=3)


def test_probe_changes_neither_the_model_nor_torchs_generator():
    model, batch = image_model(), Batch(images(2)[0].float(), images(2)[1])
    before, state = torch.random.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    assert probe(model, FP32, batch, cross_entropy, 3) == []
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert isinstance(model[3], nn.Dropout2d)


def test_probe_warns_about_random_numbers_that_a_compiled_model_draws_outside_of_dropout_modules():
    assert probe(FunctionalDropout(), FP32, BATCH, cross_entropy, 3) == []
    (warning,) = probe(FunctionalDropout(), FP32, BATCH, cross_entropy, 3, compile_model=True)
    assert "draws random numbers outside nn.Dropout modules" in warning
    assert "will not repeat or resume bit for bit" in warning


@pytest.mark.parametrize(("rule", "starts"), [(SMA(rate_scaling="none"), (40, 44, 48)), (Independent(), (40, 40, 40))])
def test_plan_shares_the_stream_out_under_sma_and_gives_independent_learners_the_same_batch(rule, starts):
    trainer = make_trainer(num_learners=3, averaging=rule, optimizer=SGD(learning_rate=(0.1, 0.2, 0.4)))
    plan = plan_round(trainer.run, 7, 40, 0.5)
    assert (plan.index, plan.starts, plan.learning_rates) == (7, starts, (0.05, 0.1, 0.2))
    assert (plan.averaging is None) == (not rule.has_central_model)
