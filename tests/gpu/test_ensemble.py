"""Ensembles and evaluation of banks on CUDA: the answers of plain PyTorch, from captured graphs too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crossbow_py import Ensemble
from crossbow_py.core.errors import UserError
from crossbow_py.data.build import make_feed
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.predict.predictors import MOST_PROGRAMS
from crossbow_py.train.evaluation.evaluator import Evaluator, evaluate_bank
from tests.support import features, norm_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]

CUDA = torch.device("cuda")


def convolutional(seed):
    torch.manual_seed(seed)
    model = norm_model()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    return model


def dense(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


@pytest.mark.parametrize("executor", ["auto", "serial", "fused", "streams"])
def test_ensemble_of_two_architectures_on_cuda_equals_plain_pytorch_at_every_call(executor):
    models = [convolutional(0), dense(1), convolutional(2), dense(3)]
    with Ensemble(models, executor=executor, device="cuda") as ensemble, torch.no_grad():
        for size in (1, 5, 5, 1):  # the second time a graph that was captured is replayed, on other values
            batch = torch.randn(size, 3, 6, 6)
            expected = torch.stack([copy.deepcopy(model).eval()(batch).softmax(1) for model in models])
            members, mean = ensemble.members(batch.to(CUDA)), ensemble.predict(batch.to(CUDA))
            assert (members.cpu() - expected).abs().max() <= 1e-5
            assert (mean.cpu() - expected.mean(0)).abs().max() <= 1e-5


@pytest.mark.parametrize("executor", ["threads", "fused_threads"])
def test_executors_of_cpu_threads_are_refused_on_cuda(executor):
    with pytest.raises(UserError, match=f"executor={executor} runs on cpu only, and device is cuda"):
        Ensemble([dense(0)], executor=executor, device="cuda")


def assert_right_from_two_streams(ensemble, models, batches):
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for index, batch in enumerate(batches):
        with torch.cuda.stream(streams[index % 2]):
            found.append(ensemble.members(batch))
    torch.cuda.synchronize()
    with torch.no_grad():
        for own, batch in zip(found, batches, strict=True):
            expected = torch.stack([model(batch.cpu()).softmax(1) for model in models])
            assert (own.cpu() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_captured_ensemble_called_from_several_streams_gives_each_its_own_answer(executor):
    models, batches = [dense(seed) for seed in range(4)], torch.randn(20, 8, 3, 6, 6, device=CUDA)
    ensemble = Ensemble(models, executor=executor, device="cuda")
    ensemble.predict(batches[0])
    torch.cuda.synchronize()
    assert_right_from_two_streams(ensemble, models, batches)


@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_graphs_are_kept_for_the_last_shapes_alone_and_share_memory(executor):
    models, reserved = [dense(seed) for seed in range(4)], []
    with Ensemble(models, executor=executor, device="cuda") as ensemble, torch.no_grad():
        for size in (*range(1, 3 * MOST_PROGRAMS), *range(1, 4)):
            batch = torch.randn(size, 3, 6, 6)
            expected = torch.stack([model(batch).softmax(1) for model in models])
            for _ in range(2):
                assert (ensemble.members(batch.to(CUDA)).cpu() - expected).abs().max() <= 1e-5
            assert len(ensemble._predictor(executor)._programs) <= MOST_PROGRAMS
            reserved.append(torch.cuda.memory_reserved())
    assert max(reserved) <= reserved[MOST_PROGRAMS - 1] + 16 * 2**20
    assert ensemble.predict(torch.randn(2, 3, 6, 6).to(CUDA)).shape == (2, 3)  # after the last graph of a pool has gone
    ensemble.close()


def test_graphs_of_several_shapes_called_from_several_streams_give_each_its_own_answer():
    models = [dense(seed) for seed in range(4)]
    batches = [torch.randn(size, 3, 6, 6, device=CUDA) for size in (8, 64, 3, 16) * 10]
    with Ensemble(models, executor="streams", device="cuda") as ensemble, torch.no_grad():
        for batch in batches[:4]:
            ensemble.predict(batch)
        torch.cuda.synchronize()
        assert_right_from_two_streams(ensemble, models, batches)


@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_ensemble_without_graphs_says_so_once(executor, monkeypatch):
    monkeypatch.setenv("CROSSBOW_GRAPHS", "0")
    with Ensemble([dense(0), dense(1)], executor=executor, device="cuda") as ensemble:
        for size in (1, 2, 1):
            ensemble.predict(torch.randn(size, 3, 6, 6, device=CUDA))
        assert ensemble.notes == ["CUDA graphs are not used: CROSSBOW_GRAPHS is 0."]


def test_models_that_draw_are_run_by_streams_without_a_graph():
    class Noisy(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + torch.rand((), device=inputs.device)

    with Ensemble([Noisy(4, 3) for _ in range(2)], executor="streams", device="cuda") as ensemble:
        batch = torch.randn(2, 4, device=CUDA)
        assert ensemble.members(batch).sum().item() == pytest.approx(4, abs=1e-5)
        assert ensemble.predict(batch).shape == (2, 3)


def test_rows_of_a_bank_on_cuda_are_evaluated_together_as_each_alone():
    template = norm_model().double().to(CUDA)
    bank = ReplicaBank(template, 3, device=CUDA, precision=FP64, state_names=("momentum",), shares_base=False)
    for row in range(3):
        bank.load_learner(row, convolutional(row).double().to(CUDA))
    feed = make_feed(features(10, (3, 6, 6)), 1, 0, CUDA, channels_last=True, dtype=torch.float64)
    evaluator = Evaluator(template, precision=FP64, loss=nn.functional.cross_entropy, metrics={}, batch_size=4)
    together = evaluate_bank(bank, evaluator, feed, [2, 0])
    for own, row in zip(together, (2, 0), strict=True):
        alone = evaluator.evaluate(bank.learner_state(row), feed)
        assert own.loss == pytest.approx(alone.loss, rel=1e-9)
        assert own.accuracy == alone.accuracy
