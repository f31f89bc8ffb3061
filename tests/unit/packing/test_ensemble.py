"""Ensembles: members and their mean against plain PyTorch, whatever runs them; which models share a bank."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

from crossbow_py import Ensemble
from crossbow_py.errors import UserError
from crossbow_py.packing import predictors
from crossbow_py.packing.architecture import same_architecture
from crossbow_py.packing.predictors import PREDICTORS
from tests import networks
from tests.support import norm_model

EXECUTORS = ["auto", *PREDICTORS]


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


@pytest.mark.parametrize("executor", PREDICTORS)
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


def test_members_are_the_callers_own():
    ensemble, batch = Ensemble(seeded(mlp, 2), executor="fused", device="cpu"), torch.randn(2, 12)
    first = ensemble.members(batch)
    first.zero_()
    assert ensemble.members(batch).sum() == pytest.approx(4)


def test_bf16_gives_other_numbers_and_probabilities_in_float32():
    models, batch = seeded(mlp, 3), torch.randn(4, 12)
    found = Ensemble(models, executor="fused", device="cpu", precision="bf16").predict(batch)
    assert found.dtype == torch.float32
    assert 0 < (found - by_hand(models, batch).mean(0)).abs().max() < 0.02


def test_models_that_cannot_be_fused_run_by_auto_with_a_note_and_are_refused_by_fused():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    models, batch = [Branching(4, 3) for _ in range(2)], torch.randn(2, 4)
    with Ensemble(models, device="cpu") as ensemble:
        assert_as_by_hand(ensemble, models, batch)
        assert len(ensemble.notes) == 1 and "torch.export cannot capture it" in ensemble.notes[0]
    with pytest.raises(UserError, match=r"executor=fused cannot run these models: .*; set executor=auto\."):
        Ensemble(models, executor="fused", device="cpu").predict(batch)


def test_closing_ends_the_threads_and_the_ensemble_may_be_used_again():
    before, models = threading.active_count(), seeded(mlp, 3)
    ensemble, num_threads = Ensemble(models, executor="threads", device="cpu"), torch.get_num_threads()
    for _ in range(2):
        assert_as_by_hand(ensemble, models, torch.randn(2, 12))
        ensemble.close()
        assert threading.active_count() == before
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "an ensemble must have at least one model, got none"),
        ([nn.Linear(4, 3), "model"], {}, "must be nn.Modules, got str"),
        ([nn.Linear(4, 3)], {"executor": "fast"}, "executor must be auto, serial, threads, fused, got 'fast'"),
        ([nn.Linear(4, 3), nn.Linear(4, 2)], {}, r"the same classes, got models of \[2, 3\] classes"),
        ([nn.Linear(4, 3), nn.Linear(5, 3)], {}, "does not go through a model of the ensemble"),
        ([nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))], {}, r"scores of classes \[B, classes\], got a tensor \[6\]"),
        ([nn.LSTM(4, 3)], {}, "got tuple for 2 inputs"),
    ],
)
def test_what_makes_no_ensemble_is_said_in_one_line(models, options, message):
    with pytest.raises(UserError, match=message) as refused:
        Ensemble(models, device="cpu", **options).predict(torch.randn(2, 4))
    assert "\n" not in str(refused.value)


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
