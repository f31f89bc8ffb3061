"""Evaluation against a plain PyTorch loop and of whole banks; recalibrated BatchNorm against a hand computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import DeviceLostError
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from crossbow_py.train.evaluation.evaluator import (
    NUM_EXAMPLES,
    Evaluation,
    Evaluator,
    evaluate_bank,
    evaluate_in_memory,
    mean_evaluation,
    prediction_bank,
)
from tests import networks
from tests.support import CPU, features, feed_of, linear_model, norm_model

INPUTS, TARGETS = features(10)


def mean_square(output, target):
    return output.square().mean()


def make_evaluator(model, precision=FP64, **options):
    settings = {"loss": nn.functional.cross_entropy, "metrics": {}, "batch_size": 4, **options}
    return Evaluator(model, precision=precision, **settings)


def evaluated(model, inputs, targets, precision=FP64, **options):
    """Evaluate a model's own state."""
    return make_evaluator(model, precision, **options).evaluate(model.state_dict(), feed_of(inputs, targets, precision))


def recalibrated(model, *batches):
    """Return the state after recalibration on batches of single values, [B, 1] or [B, 1, T]."""
    model = model.double()
    return make_evaluator(model).recalibrate(model.state_dict(), [torch.tensor(batch).double() for batch in batches])


def test_evaluate_with_a_partial_last_batch_equals_the_means_over_all_samples():
    model = linear_model().double()
    output = model(INPUTS.double()).detach()
    ours = evaluated(model, INPUTS, TARGETS, metrics={"square": mean_square})
    # Batches of 4, 4 and 2: weighted by size, the means of batch means are the means over all ten.
    assert ours.loss == pytest.approx(nn.functional.cross_entropy(output, TARGETS).item(), rel=1e-12)
    assert ours.metrics == {"square": pytest.approx(mean_square(output, TARGETS).item(), rel=1e-12)}
    assert ours.accuracy == sum(int(row.argmax()) == int(t) for row, t in zip(output, TARGETS, strict=True)) / 10
    assert ours.num_samples == 10


def test_evaluate_equals_a_plain_loop_in_evaluation_mode_with_batch_norm_and_dropout():
    images, targets = features(10, (3, 6, 6))
    model = norm_model().double()
    model.insert(4, nn.Dropout(0.5))
    for value in (model[1].running_mean, model[1].running_var):
        value.uniform_(0.5, 1.5)
    template, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    ours = make_evaluator(template).evaluate(state, feed_of(images, targets))
    model.eval()
    losses = [
        nn.functional.cross_entropy(model(images[n : n + 1].double()), targets[n : n + 1]).item() for n in range(10)
    ]
    assert ours.loss == pytest.approx(sum(losses) / 10, rel=1e-10)
    assert all(torch.equal(value, state[name]) for name, value in template.state_dict().items())
    assert template.training


def test_evaluate_in_bf16_is_close_to_float32_and_sums_losses_in_float32():
    images, targets = features(10, (3, 6, 6))
    fp32, bf16 = (evaluated(norm_model(), images, targets, kind).loss for kind in (FP32, BF16))
    assert 0 < abs(bf16 - fp32) < 0.01


def test_module_is_in_master_precision_and_evaluation_mode_with_the_state_copied():
    state = norm_model().state_dict()
    module = make_evaluator(norm_model(), BF16).module(state)
    assert not module.training
    assert module[0].weight.dtype == torch.float32
    module[0].weight.data.zero_()
    assert state["0.weight"].abs().sum() > 0


def test_recalibrate_gives_the_plain_means_of_batch_statistics():
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.9))
    model[0].running_mean.fill_(7.0)
    model[0].weight.data.fill_(2.0)
    state = recalibrated(model, [[1.0], [3.0]], [[4.0], [10.0]])
    # Means 2 and 7; unbiased variances 2 and 18.
    assert state["0.running_mean"].tolist() == [4.5]
    assert state["0.running_var"].tolist() == [10.0]
    assert state["0.weight"].tolist() == [2.0]
    assert model[0].running_mean.tolist() == [7.0]


def test_recalibrate_gives_plain_means_to_instance_norm_too():
    model = nn.Sequential(nn.InstanceNorm1d(1, track_running_stats=True))
    state = recalibrated(model, [[[1.0, 3.0]]], [[[4.0, 10.0]]])
    assert (state["0.running_mean"].tolist(), state["0.running_var"].tolist()) == ([4.5], [10.0])


class Twice(nn.Module):
    """A model that calls one norm twice, the second time on half of the input."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, inputs):
        return self.norm(inputs) + self.norm(inputs / 2)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_recalibrate_counts_every_call_of_a_norm_alike(kind):
    state = recalibrated(Twice(kind(1, track_running_stats=True)), [[[1.0, 3.0]]], [[[4.0, 10.0]]])
    assert state["norm.running_mean"].item() == pytest.approx((2 + 1 + 7 + 3.5) / 4)


class WithOneFrozen(nn.Sequential):
    """A model that freezes its first norm, as in fine-tuning."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].eval()
        return self


def test_recalibrate_leaves_statistics_that_the_model_does_not_train():
    model = WithOneFrozen(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    model[0].running_mean.fill_(7.0)
    state = recalibrated(model, [[1.0], [3.0]])
    assert (state["0.running_mean"].tolist(), state["0.running_var"].tolist()) == ([7.0], [1.0])
    assert state["1.running_mean"].item() == pytest.approx(-5.0, rel=1e-4)


def test_recalibrate_passes_over_batches_that_are_not_finite():
    model, bad = nn.Sequential(nn.BatchNorm1d(1)), [[1.0], [float("nan")]]
    model[0].running_mean.fill_(7.0)
    assert recalibrated(model, bad, [[1.0], [3.0]])["0.running_mean"].tolist() == [2.0]
    state = recalibrated(model, bad)
    assert (state["0.running_mean"].tolist(), state["0.running_var"].tolist()) == ([7.0], [1.0])


def test_recalibrate_measures_later_layers_behind_recalibrated_batches():
    # The second norm sees the first one's output with batch statistics: mean 0, whatever the input's.
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).double()
    state = make_evaluator(model).recalibrate(model.state_dict(), [torch.randn(50, 2).double() * 3 + 5])
    torch.testing.assert_close(state["1.running_mean"], torch.zeros(2).double(), atol=1e-12, rtol=0)


def test_recalibrate_without_batch_norm_changes_nothing_and_reads_no_batch():
    state = linear_model().double().state_dict()

    def batches():
        raise AssertionError("a batch was read")
        yield

    assert make_evaluator(linear_model()).recalibrate(state, batches()) == state


def image_evaluator(**options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    return make_evaluator(model, **options), model.state_dict()


@pytest.mark.parametrize(("max_batches", "total"), [(None, 60), (10, 40)])
def test_examples_are_spread_over_what_is_measured_and_always_the_same(max_batches, total):
    images, targets = torch.arange(60.0).view(60, 1, 1, 1), torch.zeros(60, dtype=torch.int64)
    evaluator, state = image_evaluator(max_batches=max_batches)
    found = evaluator.evaluate(state, feed_of(images, targets), examples=True).examples
    assert found.inputs.flatten().tolist() == [place * total // NUM_EXAMPLES for place in range(NUM_EXAMPLES)]
    assert found.outputs.shape == (NUM_EXAMPLES, 2)
    assert evaluator.evaluate(state, feed_of(images, targets)).examples is None


def test_examples_of_few_samples_are_all_of_them():
    images, targets = torch.zeros(5, 1, 1, 1), torch.tensor([0, 1, 0, 1, 1])
    evaluator, state = image_evaluator()
    found = evaluator.evaluate(state, feed_of(images, targets), examples=True).examples
    assert found.targets.tolist() == [0, 1, 0, 1, 1]


class TimeFirst(nn.Linear):
    """A model with outputs [T, B, classes]."""

    def forward(self, inputs):
        return super().forward(inputs).transpose(0, 1)


@pytest.mark.parametrize(
    ("model", "shape"), [(TimeFirst(4, 3), (10, 6, 4)), (nn.Linear(4, 3), (10, 6, 4)), (nn.Linear(4, 3), (10, 4))]
)
def test_what_is_not_images_of_one_class_each_leaves_no_examples(model, shape):
    evaluator = make_evaluator(model, loss=mean_square)
    inputs, targets = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
    assert evaluator.evaluate(model.state_dict(), feed_of(inputs, targets), examples=True).examples is None


def test_mean_evaluation_averages_every_figure():
    each = [Evaluation(1.0, 0.5, 10, {"a": 2.0}), Evaluation(2.0, 0.7, 10, {"a": 4.0})]
    assert mean_evaluation(each) == Evaluation(1.5, pytest.approx(0.6), 10, {"a": 3.0})
    assert mean_evaluation([Evaluation(1.0, None, 10)]).accuracy is None


class Short:
    """A loss that raises an error for more samples than memory holds."""

    def __init__(self, most, error):
        self.most, self.error, self.sizes = most, error, []

    def __call__(self, outputs, targets):
        self.sizes.append(len(outputs))
        if len(outputs) > self.most:
            raise self.error
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.slow
def test_evaluation_in_little_memory_halves_its_batches_and_finds_the_same():
    model, feed = linear_model(), feed_of(INPUTS, TARGETS)
    loss = Short(3, MemoryError())
    evaluator = make_evaluator(model, loss=loss, batch_size=8)
    found = evaluate_in_memory(evaluator, model.state_dict(), feed, torch.device("cpu"))
    assert loss.sizes == [8, 4, 2, 2, 2, 2, 2] and evaluator.batch_size == 2
    assert found.loss == pytest.approx(make_evaluator(model).evaluate(model.state_dict(), feed).loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "raised", "device", "sizes"),
    [
        (MemoryError(), MemoryError, "cpu", [4, 2, 1]),
        (ArithmeticError("no"), ArithmeticError, "cpu", [4]),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLostError, "cuda", [4]),
    ],
)
def test_evaluation_raises_what_fewer_samples_do_not_change(error, raised, device, sizes):
    model, loss = linear_model(), Short(0, error)
    evaluator, feed = make_evaluator(model, loss=loss), feed_of(INPUTS, TARGETS)
    with pytest.raises(raised):
        evaluate_in_memory(evaluator, model.state_dict(), feed, torch.device(device))
    assert loss.sizes == sizes


def test_evaluate_counts_outputs_that_are_not_finite_as_wrong():
    # Rows whose largest score is NaN, infinity or minus infinity answer nothing; a class ruled out is no fault.
    inputs = torch.tensor([[2.0, 0.0], [torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf] * 2, [1.0, -torch.inf]])
    targets = torch.zeros(5, dtype=torch.int64)
    found = evaluated(nn.Identity(), inputs, targets, FP32, batch_size=2, loss=mean_square)
    assert (found.accuracy, found.num_non_finite) == (2 / 5, 3)


def test_evaluate_of_a_regression_counts_outputs_that_are_not_finite():
    inputs = torch.tensor([[1.0], [torch.nan], [-torch.inf]])
    found = evaluated(nn.Identity(), inputs, inputs, FP32, loss=mean_square)
    assert (found.accuracy, found.num_non_finite) == (None, 2)


def test_evaluate_keeps_a_metric_named_loss_apart_from_the_loss():
    names = [("loss", "correct"), ("square",)]
    measured, expected = (
        evaluated(linear_model(), INPUTS, TARGETS, FP32, metrics=dict.fromkeys(each, mean_square)) for each in names
    )
    assert (measured.loss, measured.accuracy) == (expected.loss, expected.accuracy)
    assert measured.metrics == {"loss": expected.metrics["square"], "correct": expected.metrics["square"]}


K = 4


class Branching(nn.Linear):
    """A layer that no export can capture."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def make_bank(make, precision=FP64, **options):
    """Four learners with weights and statistics of their own, in a bank for training."""
    bank = ReplicaBank(make(), K, device=CPU, precision=precision, state_names=("momentum",), **options)
    for learner in range(K):
        torch.manual_seed(learner)
        with torch.no_grad():
            for name, value in bank.learner_state(learner).items():
                if value.is_floating_point() and name not in bank.base.master(learner):
                    value.add_(torch.rand_like(value) if name.endswith("running_var") else torch.randn_like(value))
        bank.refresh_shadow(learner)
    return bank


def evaluator_of(bank, **options):
    return make_evaluator(bank.template, bank.precision, **options)


def assert_as_alone(bank, evaluator, feed, learners, tolerance=1e-10, fused=True):
    found = evaluate_bank(bank, evaluator, feed, learners, fused=fused)
    alone = [evaluator.evaluate(bank.learner_state(learner), feed) for learner in learners]
    assert len(found) == len(alone)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
        assert ours.accuracy == theirs.accuracy
        assert ours.num_samples == theirs.num_samples
        assert ours.metrics == pytest.approx(theirs.metrics, rel=tolerance)
    return found


@pytest.mark.parametrize("order", ["blocks", "rows"])
@pytest.mark.parametrize("learners", [range(K), [3, 0], [2]])
def test_rows_with_a_partial_last_batch_are_evaluated_as_each_alone(order, learners):
    bank = make_bank(norm_model, order=order)
    metrics = {"square": lambda output, target: output.square().mean(), "seven": lambda output, target: 7.0}
    feed = feed_of(*features(10, (3, 6, 6)))
    found = assert_as_alone(bank, evaluator_of(bank, metrics=metrics), feed, learners)
    assert len({each.loss for each in found}) == len(learners)
    assert found[0].metrics["seven"] == 7.0


def test_rows_are_evaluated_in_one_pass_and_the_bank_stays_as_it_was(monkeypatch):
    def alone(*_):
        raise AssertionError("evaluated alone")

    bank, feed = make_bank(norm_model), feed_of(*features(10, (3, 6, 6)))
    before = copy.deepcopy(bank.state_dict())
    monkeypatch.setattr(Evaluator, "evaluate", alone)
    evaluate_bank(bank, evaluator_of(bank), feed, range(K), fused=True)
    torch.testing.assert_close(bank.state_dict(), before, rtol=0, atol=0)


def test_first_batches_alone_are_measured_where_that_was_asked_for():
    bank = make_bank(linear_model)
    found = assert_as_alone(bank, evaluator_of(bank, max_batches=2), feed_of(*features(10)), range(K))
    assert found[0].num_samples == 8


def test_regression_has_a_loss_and_no_accuracy():
    bank = make_bank(lambda: nn.Linear(4, 1))
    feed = feed_of(features(10)[0], torch.randn(10, 1).double())
    found = assert_as_alone(bank, evaluator_of(bank, loss=nn.functional.mse_loss), feed, range(K))
    assert {each.accuracy for each in found} == {None}


def test_loss_of_one_value_in_a_vector_serves():
    bank = make_bank(linear_model)
    evaluator = evaluator_of(bank, loss=lambda *batch: nn.functional.cross_entropy(*batch).reshape(1))
    assert_as_alone(bank, evaluator, feed_of(*features(9)), range(K))


@pytest.mark.parametrize("network", [networks.Tied, networks.LstmClassifier, networks.HandAttention])
def test_tied_weights_loops_and_constants_serve(network):
    bank = make_bank(network)
    assert_as_alone(bank, evaluator_of(bank), feed_of(*networks.inputs_for(network, 6)), range(K))


def test_rows_in_bf16_are_evaluated_on_their_bf16_copies():
    bank = make_bank(norm_model, BF16)
    assert_as_alone(bank, evaluator_of(bank), feed_of(*features(8, (3, 6, 6)), BF16), range(K), tolerance=0.02)


@pytest.mark.parametrize("reason", ["cannot be fused", "memory"])
def test_rows_that_cannot_run_together_are_evaluated_one_by_one(reason, monkeypatch):
    def fail(*_):
        raise MemoryError

    if reason == "memory":
        monkeypatch.setattr("crossbow_py.train.evaluation.evaluator.prediction_bank", fail)
    bank = make_bank(linear_model if reason == "memory" else lambda: Branching(4, 3))
    assert_as_alone(bank, evaluator_of(bank), feed_of(*features(10)), range(K))


def test_other_errors_are_no_reason_to_evaluate_one_by_one():
    bank = make_bank(linear_model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|mat1"):
        evaluate_bank(bank, evaluator_of(bank), feed_of(*features(10, (5,))), range(K), fused=True)


def test_prediction_bank_has_copies_of_weights_and_all_buffers_in_the_order_asked_for():
    bank = make_bank(norm_model)
    bank.learner_state(2)["1.num_batches_tracked"].fill_(9)
    copies = prediction_bank(bank, [2, 1])
    for row, learner in enumerate([2, 1]):
        torch.testing.assert_close(copies.learner_state(row), bank.learner_state(learner), rtol=0, atol=0)
    copies.weights.zero_row(0)
    assert bank.learner_state(2)["5.weight"].abs().sum() > 0
    assert copies.gradients.num_rows == 0


def test_evaluation_on_a_cpu_takes_a_thread_a_core_and_gives_them_back():
    bank, threads = make_bank(norm_model), set()
    counting = {"threads": lambda outputs, targets: threads.add(torch.get_num_threads()) or 0.0}
    evaluator, before = evaluator_of(bank, metrics=counting), torch.get_num_threads()
    assert_as_alone(bank, evaluator, feed_of(*features(10, (3, 8, 8))), [2, 0, 3], fused=None)
    assert 1 in threads and torch.get_num_threads() == before


@pytest.mark.parametrize("fused", [False, True])
def test_evaluate_bank_counts_outputs_that_are_not_finite_as_wrong(fused):
    bank = make_bank(linear_model)
    inputs, targets = features(10)
    inputs[:3, 0] = torch.nan
    for evaluation in evaluate_bank(bank, evaluator_of(bank), feed_of(inputs, 0 * targets), range(K), fused=fused):
        predicted = evaluation.accuracy * 10
        assert predicted <= 7 and predicted == round(predicted)
        assert evaluation.num_non_finite == 3
