"""Evaluating the rows of a bank in one pass: what `Evaluator` finds for each of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP64
from crossbow_py.train.evaluation import packed_evaluation
from crossbow_py.train.evaluation.evaluator import Evaluator
from crossbow_py.train.evaluation.packed_evaluation import evaluate_bank, prediction_bank
from tests import networks
from tests.support import CPU, features, feed_of, linear_model, norm_model

K = 4


class Branching(nn.Linear):
    """Which no export can capture."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def make_bank(make, precision=FP64, **options):
    """Four learners with weights and statistics of their own, in a bank for training."""
    bank = ReplicaBank(make(), K, device=CPU, precision=precision, state_names=("momentum",), **options)
    for learner in range(K):
        torch.manual_seed(learner)
        with torch.no_grad():
            for name, value in bank.learner_state(learner).items():
                if value.is_floating_point():
                    value.add_(torch.rand_like(value) if name.endswith("running_var") else torch.randn_like(value))
        bank.refresh_shadow(learner)
    return bank


def evaluator_of(bank, **options):
    settings = {"loss": nn.functional.cross_entropy, "metrics": {}, "batch_size": 4, **options}
    return Evaluator(bank.template, precision=bank.precision, **settings)


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
    assert_as_alone(
        bank,
        evaluator_of(bank, loss=lambda output, target: nn.functional.cross_entropy(output, target).reshape(1)),
        feed_of(*features(9)),
        range(K),
    )


@pytest.mark.parametrize("network", [networks.Tied, networks.LstmClassifier, networks.HandAttention])
def test_tied_weights_loops_and_constants_serve(network):
    bank = make_bank(network)
    assert_as_alone(bank, evaluator_of(bank), feed_of(*networks.inputs_for(network, 6)), range(K))


def test_rows_in_bf16_are_evaluated_on_their_bf16_copies():
    bank = make_bank(norm_model, BF16)
    assert_as_alone(bank, evaluator_of(bank), feed_of(*features(8, (3, 6, 6)), BF16), range(K), tolerance=0.02)


def test_model_that_cannot_be_fused_is_evaluated_one_by_one():
    bank = make_bank(lambda: Branching(4, 3))
    assert_as_alone(bank, evaluator_of(bank), feed_of(*features(10)), range(K))


def test_rows_that_memory_does_not_hold_together_are_evaluated_one_by_one(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(packed_evaluation, "prediction_bank", fail)
    bank = make_bank(linear_model)
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
