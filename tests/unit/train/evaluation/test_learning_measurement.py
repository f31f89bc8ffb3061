"""Statistics of learning against plain autograd, and that measuring them does not change training."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from crossbow_py import SGD, SMA, Augmentation, CheckpointSettings, Independent
from crossbow_py.core.errors import DataError
from crossbow_py.data.feed import Batch
from crossbow_py.telemetry.records import read_metrics
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train import trainer as trainer_module
from crossbow_py.train.evaluation.current_models import current_models
from crossbow_py.train.evaluation.learning_measurement import LearningMeasurement, gradient_norms, hessian_eigenvalue
from crossbow_py.train.evaluation.learning_statistics import gradient_noise
from tests.rank_jobs import assert_alike, measure_with_a_failure, results, train_measured
from tests.ranks import on_ranks
from tests.support import features, linear_model, norm_model
from tests.trainers import Recorder, blobs, equal_states, image_model, images, make_trainer

cross_entropy = nn.functional.cross_entropy


class Once(torch.autograd.Function):
    """The identity, without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient


class OnceModel(nn.Linear):
    """A model with second derivatives in all but one operator."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return Once.apply(super().forward(x)).square()


class Counting(nn.Linear):
    """A model that counts how often any copy of it runs."""

    calls = 0

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


def small_model():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Dropout(0.5))
    model[0].bias.requires_grad_(False)
    return model.double().eval()


def hessian_eigenvalues(module, loss, inputs, targets):
    """Return all eigenvalues, by torch's own Hessian."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    values = [p.detach() for p in module.parameters() if p.requires_grad]
    fixed = {name: p.detach() for name, p in module.named_parameters() if name not in names}
    flat = torch.cat([value.flatten() for value in values])

    def of(vector):
        parts = [part.view(v.shape) for part, v in zip(vector.split([v.numel() for v in values]), values, strict=True)]
        state = {**fixed, **dict(zip(names, parts, strict=True)), **dict(module.named_buffers())}
        return loss(torch.func.functional_call(module, state, (inputs,)), targets)

    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(of, flat))


def measured(**options):
    """Return (records, trainer, recorder) of a run with statistics."""
    stops = options.pop("stops", {"max_epochs": 2})
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder], learning_statistics=True, **options)
    trainer.fit(**stops)
    return recorder.of("epoch"), trainer, recorder


def image_options(**options):
    return {
        "model": image_model, "train_data": images(50), "test_data": images(20),
        "augmentation": Augmentation(crop_padding=2, flip=True),
        "optimizer": SGD(learning_rate=0.05, momentum=0.9, weight_decay=1e-2), **options,
    }  # fmt: skip


def values_of(learning):
    return {name: value for name, value in dataclasses.asdict(learning).items() if name != "measuring_s"}


# The figures


def test_gradient_norms_are_those_of_hand_made_gradients_of_a_linear_model():
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    inputs = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 1.0], [0.0, 3.0]]])
    targets = torch.zeros(2, 2, 1).double()
    batches = [Batch(*each) for each in zip(inputs, targets, strict=True)]
    squared_norms, of_mean = gradient_norms(model, nn.functional.mse_loss, batches)
    # The gradient of a sample is 2·(w·x)·x, so of the batches ((2, 0) + (0, -2)) / 2 and ((4, 2) + (0, -18)) / 2.
    assert squared_norms == [pytest.approx(1 + 1), pytest.approx(4 + 64)]
    assert of_mean == pytest.approx(1.5**2 + 4.5**2)


@pytest.mark.parametrize("loss", [cross_entropy, lambda output, targets: -cross_entropy(output, targets)])
def test_hessian_eigenvalue_is_the_largest_of_torchs_own_hessian(loss):
    model, (inputs, targets) = small_model(), features(12)
    expected = hessian_eigenvalues(model, loss, inputs.double(), targets)
    assert hessian_eigenvalue(model, loss, Batch(inputs, targets)) == pytest.approx(float(expected[-1]), rel=0.01)


def test_hessian_eigenvalue_with_batch_norm_takes_its_statistics_as_they_are():
    model, (inputs, targets) = norm_model().double(), features(12, (3, 6, 6))
    model[2] = nn.Tanh()
    model[1].running_mean.uniform_(-0.5, 0.5), model[1].running_var.uniform_(0.5, 1.5)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = hessian_eigenvalues(model, cross_entropy, inputs.double(), targets)[-1]
    assert hessian_eigenvalue(model, cross_entropy, Batch(inputs, targets)) == pytest.approx(float(expected), rel=0.01)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hessian_of_a_loss_that_is_linear_in_the_weights_is_zero():
    batch = Batch(*features(6))
    assert hessian_eigenvalue(linear_model(), lambda output, targets: output.mean(), batch) == 0.0


def test_statistics_of_a_run_are_what_plain_autograd_makes_of_the_average_model():
    options = {"test_data": blobs(30), "optimizer": SGD(learning_rate=0.02), "label_smoothing": 0.1}
    records, trainer, _ = measured(stops={"max_epochs": 1}, **options)
    found, z, feed = records[-1].learning, current_models(trainer.run)[0].double(), trainer.run.train_feed

    def loss(output, targets):
        return cross_entropy(output, targets, label_smoothing=0.1)

    gradients = []
    for start in range(40, 80, 4):  # of the epoch that follows
        value = loss(z(feed.batch(start).inputs.double()), feed.batch(start).targets)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(z.parameters()))]))
    stacked = torch.stack(gradients)
    noise = gradient_noise(stacked.square().sum(1).tolist(), float(stacked.mean(0).square().sum()), 4, 40)
    assert found.gradient_variance == pytest.approx(noise.variance, rel=1e-4)
    assert found.squared_gradient_norm == pytest.approx(noise.squared_norm, rel=1e-4)
    assert found.gradient_noise_scale_samples == pytest.approx(noise.scale_samples, rel=1e-3)
    first = torch.cat([feed.batch(start).inputs for start in range(0, 40, 4)])
    targets = torch.cat([feed.batch(start).targets for start in range(0, 40, 4)])
    eigenvalues = hessian_eigenvalues(z, loss, first.double(), targets)
    assert found.sharpness == pytest.approx(float(eigenvalues[-1]), rel=0.01)


@pytest.mark.parametrize("data", ["test_data", "validation_data", None])
def test_agreement_is_counted_on_the_data_that_is_evaluated_else_on_the_training_data(data):
    inputs, targets = features(33)
    options = {"train_data": features(40), data: (inputs, targets)} if data else {"train_data": (inputs, targets)}
    if data == "validation_data":
        options["test_data"] = blobs(30)
    records, trainer, _ = measured(num_learners=3, optimizer=SGD(learning_rate=(0.0, 0.3, 1.0)), **options)
    bank = trainer.run.bank
    classes = []
    for j in range(3):
        state = bank.learner_state(j)
        classes.append((inputs @ state["weight"].T + state["bias"]).argmax(1))
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum(float((classes[a] == classes[b]).float().mean()) for a, b in pairs) / 3
    assert records[-1].learning.agreement == pytest.approx(expected)
    assert 0.2 < expected < 1


# What there is nothing to measure of


def test_regression_has_no_agreement_and_the_rest():
    inputs, _ = features(40)
    options = {"train_data": (inputs, inputs[:, :3] * 2), "loss": nn.functional.mse_loss, "standardize_targets": False}
    learning = measured(**options)[0][-1].learning
    assert learning.agreement is None
    # Mean squares of 3 outputs: the Hessian is 2/3 of the inputs' second moments, the constant one included.
    extended = torch.cat([inputs, torch.ones(40, 1)], 1).double()
    expected = torch.linalg.eigvalsh(2 / 3 * extended.T @ extended / 40)[-1]
    assert learning.sharpness == pytest.approx(float(expected), rel=0.01)
    assert learning.gradient_variance > 0


def test_independent_learners_agree_or_not_and_the_rest_is_the_first_ones():
    records, trainer, _ = measured(
        averaging=Independent(), num_learners=2, optimizer=SGD(learning_rate=(0.01, 1e-9)), train_data=features(40)
    )
    learning, feed = records[-1].learning, trainer.run.train_feed
    first = torch.cat([feed.batch(start).inputs for start in range(0, 40, 4)]).double()
    targets = torch.cat([feed.batch(start).targets for start in range(0, 40, 4)])
    model = current_models(trainer.run)[0].double()
    expected = hessian_eigenvalues(model, cross_entropy, first, targets)[-1]
    assert learning.sharpness == pytest.approx(float(expected), rel=0.01)
    assert 0 < learning.agreement < 1


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"num_learners": 1}, {"agreement"}),
        ({"train_data": blobs(5)}, {"gradient_noise_scale_samples", "gradient_variance", "squared_gradient_norm"}),
    ],
    ids=["one learner", "one batch an epoch"],
)
def test_what_there_is_too_little_of_to_measure_is_none_and_the_rest_is_there(options, missing):
    learning = values_of(measured(**options)[0][-1].learning)
    assert {name for name, value in learning.items() if value is None} == missing


@pytest.mark.slow
def test_model_without_second_derivatives_has_no_sharpness_and_the_user_is_told_once():
    records, _, recorder = measured(model=OnceModel, stops={"max_epochs": 3}, optimizer=SGD(learning_rate=0.02))
    assert [record.learning.sharpness for record in records] == [None] * 3
    assert all(record.learning.gradient_variance > 0 and record.learning.agreement for record in records)
    (said,) = [message for message in recorder.of("message") if "sharpness" in message]
    assert said.startswith("The sharpness of this model is not measured (")


def test_memory_that_is_short_ends_measuring_and_not_the_run(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("crossbow_py.train.evaluation.learning_measurement.gradient_norms", refuse)
    records, trainer, recorder = measured()
    assert trainer.state.closed_epochs == 2
    assert records[-1].learning.gradient_variance is None
    assert len([message for message in recorder.of("message") if "gradient noise scale" in message]) == 1


def test_learner_that_waits_to_be_reseeded_is_left_out_of_agreement():
    _, trainer, _ = measured(num_learners=3, test_data=blobs(30))
    for values in trainer.run.bank.weights.flat(1):
        values.neg_()
    sound = LearningMeasurement(trainer.run).measure("test").agreement
    trainer.state.non_finite_learners[1] = 3
    assert LearningMeasurement(trainer.run).measure("test").agreement > sound


# What training notices


def test_statistics_that_are_off_run_no_model(monkeypatch):
    def refuse(*_):
        raise AssertionError("nobody asked")

    monkeypatch.setattr(LearningMeasurement, "__init__", refuse)
    recorder = Recorder()
    trainer = make_trainer(model=Counting, test_data=blobs(30), callbacks=[recorder])
    Counting.calls = 0
    trainer.fit(max_epochs=3)
    assert Counting.calls == 3 * (5 * 2 + 1)  # rounds of two learners, and an evaluation in one batch
    assert [record.learning for record in recorder.of("epoch")] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
@pytest.mark.parametrize("rule", [SMA(batch_norm="mean"), SMA(), Independent()], ids=["means", "recal", "apart"])
def test_run_with_statistics_is_the_one_without_in_every_bit(executor, rule):
    ends = []
    for on in (False, True):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        recorder = Recorder()
        options = image_options(executor=executor, averaging=rule)
        trainer = make_trainer(learning_statistics=on, callbacks=[recorder], **options)
        result = trainer.fit(max_epochs=3)
        drawn = (torch.rand(1).item(), random.random(), np.random.rand())
        lines = [
            (each.epoch, each.train_loss, each.test_loss, each.test_accuracy, each.spread, each.correction_norm)
            for each in recorder.of("epoch")
        ]
        ends.append((result, trainer.run.bank.state_dict(), drawn, lines))
    (off, off_bank, *off_rest), (on, on_bank, *on_rest) = ends
    assert equal_states(off.model, on.model)
    assert all(equal_states(*pair) for pair in zip(off.models, on.models, strict=True))
    assert off_rest == on_rest
    for name in ("weights", "buffers", "z", "z_prev"):
        assert all(torch.equal(value, on_bank[name][key]) for key, value in off_bank[name].items())
    momenta, on_momenta = off_bank["state"]["momentum"], on_bank["state"]["momentum"]
    assert all(torch.equal(value, on_momenta[key]) for key, value in momenta.items())


def test_run_of_data_that_streams_is_the_one_without_statistics_in_every_bit():
    inputs, targets = images(50)
    data = torch.utils.data.TensorDataset(inputs, targets)
    off, on = (
        make_trainer(**image_options(train_data=data, augmentation=Augmentation(flip=True), num_workers=1,
                                     learning_statistics=on)).fit(max_epochs=2)
        for on in (False, True)
    )  # fmt: skip
    assert equal_states(off.model, on.model)


def test_time_of_measuring_is_no_time_of_training_and_the_watch_says_so(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(trainer_module, "ThroughputMeter", lambda **_: ThroughputMeter(lambda: clock["now"]))
    measure = LearningMeasurement.measure

    said = []

    def slow(self, which):
        said.append(self._run.ranks.watch.doing)
        clock["now"] += 1000.0
        return measure(self, which)

    monkeypatch.setattr(LearningMeasurement, "measure", slow)
    records, trainer, _ = measured()
    assert (records[-1].elapsed_s, trainer.state.elapsed_s) == (0.0, 0.0)
    assert 0 < records[-1].learning.measuring_s < 60
    assert said == ["the statistics of learning after round 4", "the statistics of learning after round 9"]


@pytest.mark.slow
def test_resumed_run_measures_what_the_uninterrupted_one_does_and_may_switch_it_on(tmp_path):
    whole, parts, late = tmp_path / "whole", tmp_path / "parts", tmp_path / "late"
    options = image_options(checkpoint=CheckpointSettings(every_epochs=1))
    make_trainer(output_dir=whole, learning_statistics=True, **options).fit(max_epochs=3)
    for folder, first in ((parts, True), (late, False)):
        make_trainer(output_dir=folder, learning_statistics=first, **options).fit(max_samples=70)
        make_trainer(output_dir=folder, resume=folder, learning_statistics=True, **options).fit(max_epochs=3)
    expected, found, switched = (
        {line["epoch"]: line["learning"] and {**line["learning"], "measuring_s": 0}
         for line in read_metrics(folder / "metrics.jsonl") if line["epoch"] in (1, 2, 3)}
        for folder in (whole, parts, late)
    )  # fmt: skip
    assert found == expected
    assert switched == {**expected, 1: None}


@pytest.mark.slow
def test_two_ranks_measure_what_one_with_all_learners_does_and_the_first_alone_says_of_z():
    (one,) = results(train_measured, 1, {"num_learners": 4}, {"max_epochs": 2})
    found = results(train_measured, 2, {"num_learners": 2}, {"max_epochs": 2})
    assert_alike([ended for ended, _ in found])
    for own, first, second in zip(one[1], found[0][1], found[1][1], strict=True):
        assert first["agreement"] == second["agreement"] == own["agreement"]
        assert {name: value for name, value in first.items() if name != "measuring_s"} == {
            name: pytest.approx(value, rel=1e-6) for name, value in own.items() if name != "measuring_s"
        }
        assert (second["sharpness"], second["gradient_variance"]) == (None, None)


@pytest.mark.slow
def test_ranks_of_one_learner_each_have_an_agreement():
    found = results(train_measured, 2, {"num_learners": 1, "executor": "threads"}, {"max_epochs": 1})
    assert [learning[-1]["agreement"] for _, learning in found] == [pytest.approx(found[0][1][-1]["agreement"])] * 2
    assert 0 < found[0][1][-1]["agreement"] <= 1


@pytest.mark.slow
def test_rank_that_cannot_predict_leaves_all_without_agreement_and_with_the_rest():
    found = results(measure_with_a_failure, 2, 1, "_predictions", ValueError("torn"), {"num_learners": 2})
    assert_alike([ended for ended, _ in found])
    assert [learning["agreement"] for _, learning in found] == [None, None]
    assert found[0][1]["sharpness"] > 0
    assert any("agreement of learners" in message for message in found[1][0].messages)


def test_data_that_fails_while_the_first_rank_measures_ends_all_ranks():
    found = on_ranks(measure_with_a_failure, 2, 0, "_noise", DataError("sample 3 is torn"), {"num_learners": 1})
    assert [(each.kind, each.exit_code) for each in found] == [("DataError", 1), ("RankError", 1)]
    assert "sample 3 is torn" in found[1].text
