"""Ensembles: members and their mean against plain PyTorch, whatever runs them; which models share a bank."""

from __future__ import annotations

import copy
import itertools
import threading
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import Ensemble
from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import EXECUTORS as EXECUTORS_OF_TRAINING
from crossbow_py.engine.executors.on_device import CaptureError
from crossbow_py.predict import ensemble as ensembles
from crossbow_py.predict import predictors
from crossbow_py.predict.ensemble import same_architecture
from crossbow_py.predict.predictors import PREDICTORS, PredictorName, candidates
from tests import networks
from tests.support import norm_model

CPU = candidates(torch.device("cpu"))
EXECUTORS = ["auto", *CPU]


def mlp(width=8, activation=nn.ReLU):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), activation(), nn.Dropout(0.5), nn.Linear(width, 3))


def convolutional():
    """With statistics of its own, as after training."""
    model = norm_model()
    with torch.no_grad():
        for value in (*model.parameters(), model[1].running_mean):
            value.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model


class Branching(nn.Linear):
    """No graph can hold it."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def seeded(make, count):
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(make())
    return models


def by_hand(models, batch):
    """Each model alone, in evaluation mode."""
    with torch.no_grad():
        return torch.stack([copy.deepcopy(model).eval()(batch.clone()).softmax(1) for model in models])


def assert_as_by_hand(ensemble, models, batch, tolerance=1e-6):
    expected = by_hand(models, batch)
    for _ in range(2):
        assert (ensemble.members(batch) - expected).abs().max() <= tolerance
        assert (ensemble.predict(batch) - expected.mean(0)).abs().max() <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_members_and_their_mean_equal_plain_pytorch_at_every_batch_size(executor):
    models = seeded(convolutional, 4)
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        for size in (1, 5, 2):
            assert_as_by_hand(ensemble, models, torch.randn(size, 3, 6, 6))
        assert [shape[0] for shape, _ in ensemble.chosen] == [1, 5, 2]
        assert executor == "auto" or set(ensemble.chosen.values()) == {executor}
    assert ensemble.num_banks == 1
    assert all(model.training for model in models)  # as they were


@pytest.mark.parametrize("executor", EXECUTORS)
def test_models_of_several_architectures_are_banks_side_by_side_and_keep_their_order(executor):
    small, wide, other = seeded(mlp, 2), seeded(lambda: mlp(16), 2), seeded(lambda: mlp(activation=nn.Tanh), 1)
    models = [small[0], wide[0], other[0], small[1], wide[1]]
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, torch.randn(6, 12))
    assert (ensemble.num_banks, ensemble.num_models) == (3, 5)


@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.parametrize("network", [networks.Tied, networks.HandAttention, networks.UNet])
def test_tied_weights_tokens_and_images_serve(network, executor):
    models = seeded(network, 3)
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, networks.inputs_for(network, 4)[0], 2e-6)


@pytest.mark.parametrize("executor", CPU)
def test_a_first_layer_that_writes_to_its_inputs_harms_neither_the_others_nor_the_caller(executor):
    models = [nn.Sequential(nn.Tanh(), nn.Linear(4, 3)) for _ in range(3)]
    for model in models:
        model[0].forward = torch.tanh_
    batch = torch.randn(5, 4)
    given = batch.clone()
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, batch)
    assert torch.equal(batch, given)


def test_weights_are_copied_and_no_room_is_made_for_training():
    models = seeded(mlp, 3)
    ensemble, batch = Ensemble(models, executor="fused", device="cpu"), torch.randn(2, 12)
    before = ensemble.predict(batch)
    models[1][1].weight.data.zero_()
    assert torch.equal(ensemble.predict(batch), before)
    (bank,) = ensemble._banks
    assert bank.gradients.storage.numel() == bank.corrections.storage.numel() == 0
    assert not before.requires_grad


def test_bf16_gives_other_numbers_and_probabilities_in_float32():
    models, batch = seeded(mlp, 3), torch.randn(4, 12)
    found = Ensemble(models, executor="fused", device="cpu", precision="bf16").predict(batch)
    assert found.dtype == torch.float32
    assert 0 < (found - by_hand(models, batch).mean(0)).abs().max() < 0.02


def test_models_that_cannot_be_fused_run_by_auto_with_a_note_and_are_refused_by_fused():
    models, batch = [Branching(4, 3) for _ in range(2)], torch.randn(2, 4)
    with Ensemble(models, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, batch)
        (note,) = ensemble.notes
        assert "without executor=fused and fused_threads: torch.export cannot capture it" in note
        assert set(ensemble.chosen.values()) <= {"serial", "threads"}
    for executor in ("fused", "fused_threads"):
        with (
            Ensemble(models, executor=executor, device="cpu") as ensemble,
            pytest.raises(UserError, match=rf"executor={executor} cannot run these models: .*; set executor=auto\."),
        ):
            ensemble.predict(batch)


def test_models_that_no_cuda_graph_holds_run_by_auto_with_a_note_and_are_refused_by_fused(monkeypatch):
    def refused(predictor, inputs):
        raise CaptureError(predictor.name, "prediction", "RuntimeError: it waits for the device")

    monkeypatch.setattr(predictors.FusedPredictor, "probabilities", refused)
    models, batch = seeded(mlp, 2), torch.randn(2, 12)
    with Ensemble(models, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, batch)
        (note,) = ensemble.notes
        assert "a CUDA graph cannot hold them (RuntimeError: it waits for the device)" in note
        assert set(ensemble.chosen.values()) <= {"serial", "threads"}
    with (
        Ensemble(models, executor="fused", device="cpu") as ensemble,
        pytest.raises(CaptureError, match="set executor"),
    ):
        ensemble.predict(batch)


@pytest.fixture
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def prediction_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("crossbow prediction")]


@pytest.mark.parametrize("executor", ["threads", "fused_threads"])
def test_closing_ends_the_threads_and_the_ensemble_may_be_used_again(executor, three_cores):
    models = seeded(mlp, 4)
    ensemble = Ensemble(models, executor=executor, device="cpu")
    for _ in range(2):
        assert_as_by_hand(ensemble, models, torch.randn(2, 12))
        assert prediction_threads()
        ensemble.close()
        assert not prediction_threads()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["auto", "fused_threads"])
def test_fused_threads_of_several_architectures_keep_the_order_of_the_models(executor, three_cores):
    small, wide, other = seeded(mlp, 5), seeded(lambda: mlp(16), 2), seeded(lambda: mlp(activation=nn.Tanh), 1)
    models = [other[0], small[0], wide[0], *small[1:], wide[1]]
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, torch.randn(6, 12))
        groups = [(group.start, group.stop) for _, group in ensemble._predictor("fused_threads")._groups]
    assert groups == [(0, 1), (0, 2), (2, 4), (4, 5), (0, 1), (1, 2)]


def test_fused_threads_runs_a_graph_a_core_side_by_side_with_one_intra_op_thread_each(monkeypatch, three_cores):
    all_run, seen = threading.Barrier(3), []

    def watched(run, inputs):
        def meet(batch):
            all_run.wait(30)  # breaks unless the groups run at the same time
            found = run(batch)
            seen.append((threading.get_ident(), torch.get_num_threads(), len(found)))
            return found

        return meet

    monkeypatch.setattr(predictors, "recorded", watched)
    batch = torch.randn(2, 12)
    with Ensemble(seeded(mlp, 7), executor="fused_threads", device="cpu") as ensemble:
        ensemble.predict(batch)
        seen.clear()
        ensemble.predict(batch)
    assert sorted(rows for _, _, rows in seen) == [2, 2, 3]
    assert {number for _, number, _ in seen} == {1}
    assert len({ident for ident, _, _ in seen} - {threading.get_ident()}) == 3


@pytest.mark.parametrize("executor", CPU)
def test_answers_want_no_gradients_though_the_inputs_do(executor):
    with Ensemble(seeded(mlp, 2), executor=executor, device="cpu") as ensemble:
        assert not ensemble.predict(torch.randn(2, 12, requires_grad=True)).requires_grad


def test_executors_of_cpu_threads_are_refused_on_cuda_and_left_out_by_auto():
    assert candidates(torch.device("cpu")) == ["serial", "threads", "fused", "fused_threads"]
    for executor in ("threads", "fused_threads"):
        refusal = rf"executor={executor} runs on cpu only, and device is cuda; set executor=auto\."
        with pytest.raises(UserError, match=refusal):
            ensembles._check([nn.Linear(4, 3)], executor, torch.device("cuda"))


def test_predictions_know_every_executor_that_training_knows():
    assert set(PREDICTORS) == set(EXECUTORS_OF_TRAINING)
    assert {"auto", *PREDICTORS} == set(get_args(PredictorName))


def test_executor_of_cuda_streams_is_refused_on_a_cpu_with_the_remedy():
    with pytest.raises(UserError, match="executor=streams runs on cuda only, and device is cpu; set executor="):
        Ensemble([nn.Linear(4, 3)], executor="streams", device="cpu")


@pytest.mark.parametrize("num_models", [1, 3, 6])
def test_what_the_executor_of_cuda_streams_computes_equals_plain_pytorch(num_models):
    models = [*seeded(mlp, num_models), *seeded(lambda: mlp(16), 2)]  # one branch after another on a CPU
    with Ensemble(models, device="cpu") as ensemble:
        predictor = PREDICTORS["streams"]("streams", ensemble._banks)
        for size in (4, 2, 4):
            batch = torch.randn(size, 12, requires_grad=True)
            found = predictor.probabilities(batch)
            assert (found - by_hand(models, batch)).abs().max() <= 1e-6 and not found.requires_grad
        predictor.close()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fused", "fused_threads"])
def test_programs_are_kept_for_the_last_shapes_alone_and_made_anew_for_others(executor):
    models, most = seeded(mlp, 3), predictors.MOST_PROGRAMS
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        for size in (*range(1, most + 3), 1, most + 2):
            assert_as_by_hand(ensemble, models, torch.randn(size, 12))
            assert len(ensemble._predictor(executor)._programs) <= most
        predictor = ensemble._predictor(executor)
        assert len(predictor._programs) == most
    assert len(predictor._programs) == 0


def test_choices_and_notes_are_bounded_as_well(monkeypatch):
    monkeypatch.setattr(ensembles, "_MOST_CHOICES", 2)
    models = [Branching(4, 3) for _ in range(2)]
    with Ensemble(models, device="cpu") as ensemble:
        for size in (1, 2, 3):
            assert_as_by_hand(ensemble, models, torch.randn(size, 4))
        assert [shape[0] for shape, _ in ensemble.chosen] == [2, 3] and len(ensemble.notes) == 1


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "an ensemble must have at least one model, got none"),
        ([nn.Linear(4, 3), 1], {}, "must be nn.Modules, got int; give a list of them"),
        (["runs/five"], {}, r"must be nn.Modules, got str; give crossbow_py.load_models\('runs/five'\)"),
        ("runs/five", {}, r"must be nn.Modules, got str; give crossbow_py.load_models\('runs/five'\)"),
        ([Path("runs/five")], {}, r"must be nn.Modules, got \w+; give crossbow_py.load_models\('runs/five'\)"),
        ([nn.Linear(4, 3)], {"executor": "fast"}, "must be auto, serial, threads, fused, .*, streams, got"),
        ([nn.Linear(4, 3), nn.Linear(4, 2)], {}, r"the same classes, got models of \[2, 3\] classes"),
        ([nn.Linear(4, 3), nn.Linear(5, 3)], {}, "does not go through a model of the ensemble"),
        ([nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))], {}, r"scores of classes \[B, classes\], got a tensor \[6\]"),
        ([nn.LSTM(4, 3)], {}, "got tuple for 2 inputs"),
        ([nn.Linear(4, 1)], {}, "at least two classes, got one output, of which the softmax is always 1"),
        (nn.Sequential(nn.Linear(4, 3)), {}, r"a list of nn.Modules, got Sequential; give \[model\], or list"),
        ((nn.Linear(4, 3) for _ in range(2)), {}, "a list of nn.Modules, got generator"),
    ],
)
def test_what_makes_no_ensemble_is_said_in_one_line(models, options, message):
    with pytest.raises(UserError, match=message) as refused:
        Ensemble(models, device="cpu", **options).predict(torch.randn(2, 4))
    assert "\n" not in str(refused.value)


def test_models_that_end_in_a_softmax_are_told_that_another_is_taken():
    for last, notes in ((nn.Softmax(1), 1), (nn.LogSoftmax(1), 0)):
        models = [nn.Sequential(nn.Linear(4, 3), last) for _ in range(2)]
        with Ensemble(models, executor="serial", device="cpu") as ensemble:
            ensemble.predict(torch.randn(2, 4))
            assert len(ensemble.notes) == notes


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((2, 4), np.float32), r"must be a torch.Tensor.* got ndarray; give torch.from_numpy\(batch\)"),
        ([[0.0] * 4] * 2, r"must be a torch.Tensor.* got list; give torch.tensor\(batch\)"),
    ],
)
def test_a_batch_that_is_no_tensor_is_refused_with_what_makes_one(batch, message):
    with Ensemble([nn.Linear(4, 3)], device="cpu") as ensemble:
        for ask in (ensemble.predict, ensemble.members):
            with pytest.raises(UserError, match=message):
                ask(batch)


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(4, 3)
        self.scale = scale


class Holder(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.helper = object()


def test_models_share_a_bank_only_where_one_program_serves_them():
    hooked = nn.Linear(4, 3)
    hooked.register_forward_hook(lambda *_: None)
    tied, untied = networks.Tied(), networks.Tied()
    untied.second.weight = nn.Parameter(untied.second.weight.detach().clone())
    frozen = nn.Linear(4, 3).requires_grad_(False).eval()
    models = {
        "linear": nn.Linear(4, 3), "again": nn.Linear(4, 3), "frozen": frozen, "half": nn.Linear(4, 3).half(),
        "hooked": hooked, "scaled": Scaled((1, [2.0])), "alike": Scaled((1, [2.0])), "otherwise": Scaled((1, [3.0])),
        "tensor": Scaled(torch.ones(2)), "tensor too": Scaled(torch.ones(2)), "other": Scaled(torch.zeros(2)),
        "holder": Holder(), "holds another": Holder(), "tied": tied, "untied": untied,
        "drops": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)),
        "drops more": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)),
        "strided": nn.Conv2d(3, 3, 3, stride=2), "padded": nn.Conv2d(3, 3, 3, padding=1),
    }  # fmt: skip
    names = list(models)
    groups = [[names[position] for position in group] for group in same_architecture(list(models.values()))]
    assert [group for group in groups if len(group) > 1] == [
        ["linear", "again", "frozen"], ["scaled", "alike"], ["tensor", "tensor too"], ["drops", "drops more"],
    ]  # fmt: skip
    assert sorted(itertools.chain(*groups)) == sorted(names)


def test_fused_on_several_cores_takes_the_faster_number_of_threads_and_leaves_the_callers(monkeypatch):
    models, batch, asked = seeded(mlp, 3), torch.randn(2, 12), []

    def take_one(runs):
        asked.append(list(runs))
        return 1

    monkeypatch.setattr(predictors, "fastest", take_one)
    torch.set_num_threads(2)
    try:
        ensemble = Ensemble(models, executor="fused", device="cpu")
        assert_as_by_hand(ensemble, models, batch)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert asked == [[1, 2]]
