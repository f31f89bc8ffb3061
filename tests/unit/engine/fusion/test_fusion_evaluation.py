"""The fused graph in evaluation mode: what every module gives alone, with its own running statistics."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from crossbow_py.engine.bank.layout import Rows
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.export import exported
from crossbow_py.engine.modules.precision import BF16, FP32, FP64, cast_module
from crossbow_py.models import MODELS
from tests import networks
from tests.support import CPU, norm_model
from tests.thinned import thinned
from tests.unit.engine.fusion.trio import K, Trio

BATCH = 2
SHAPES = {
    "mlp": (1, 28, 28), "lenet": (1, 28, 28), "resnet20": (3, 32, 32), "vgg16": (3, 32, 32), "alexnet": (3, 64, 64),
    "densenet121": (3, 64, 64), "resnet18": (3, 64, 64), "resnet50": (3, 64, 64), "resnet3d10": (3, 8, 16, 16),
    **dict.fromkeys(["resnet32", "resnet44", "resnet56", "resnet110", "mobilenet", "densenet40"], (3, 32, 32)),
    **dict.fromkeys(["resnet34", "resnet101", "resnet152"], (3, 64, 64)), "resnet3d18": (3, 8, 16, 16),
    "airbench": (3, 32, 32), "gpt": (12,),
}  # fmt: skip
QUICK = ["mlp", "lenet", "resnet20", "gpt"]
LARGEST = ["alexnet", "resnet101", "resnet152"]  # of the slow ones


def own_statistics(model):
    """Running statistics as training might leave them."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif not buffer.is_floating_point():
            buffer.fill_(7)
    return model


def trio_of(make, precision=FP64, **options):
    """Models with weights and statistics of their own, in evaluation mode, and a bank that holds the same."""
    models = []
    for seed in range(K):
        torch.manual_seed(seed)
        models.append(own_statistics(make().to(precision.master)).eval())
    return Trio(models, precision, **options)


def check(trio, inputs, tolerance=1e-10):
    """Outputs for one batch of all and for a batch each, and a bank that stays as it was; the operators looped."""
    models, bank, graph = trio.models, trio.bank, trio.graph(inputs[0])
    before = copy.deepcopy([bank.learner_state(learner) for learner in range(K)])
    with torch.no_grad():
        shared = torch.stack([model(inputs[0]) for model in models])
        own = torch.stack([model(batch) for model, batch in zip(models, inputs, strict=True)])
    for _ in range(2):  # rules that did not fit are settled the second time
        for expected, given in ((shared, inputs[0]), (own, inputs)):
            found = graph.run(given.clone(), shared=given.ndim < inputs.ndim)
            assert not found.requires_grad
            assert (found - expected).norm() <= tolerance * expected.norm()
    for learner in range(K):
        for name, value in bank.learner_state(learner).items():
            assert torch.equal(value, before[learner][name]), name
    return graph.looped


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.long] * (name in LARGEST))])
    for name in SHAPES
])  # fmt: skip
def test_zoo_model_in_evaluation_mode_equals_each_module_alone_and_loops_over_nothing(name):
    trio = trio_of(lambda: MODELS[name]().build(SHAPES[name], 10), training=False)
    torch.manual_seed(9)
    shape = K, BATCH, *SHAPES[name]
    inputs = torch.randint(10, shape) if name == "gpt" else torch.randn(shape, dtype=torch.float64)
    assert check(trio, inputs) == []


def test_every_zoo_model_is_tried():
    assert {*SHAPES, "custom"} == set(MODELS)


@pytest.mark.parametrize(
    ("network", "order"),
    thinned(
        itertools.product(networks.NETWORKS, ["blocks", "rows"]),
        quick=[2 * place + place % 2 for place in range(len(networks.NETWORKS))],
    ),
)
def test_network_in_evaluation_mode_equals_each_module_alone(network, order):
    trio = trio_of(network, order=order)
    inputs = networks.inputs_for(network, K * BATCH)[0]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    check(trio, inputs.unflatten(0, (K, BATCH)))


def test_dropout_drops_nothing_and_single_samples_serve():
    trio = trio_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.Linear(8, 3)))
    check(trio, torch.randn(K, 1, 4, dtype=torch.float64))


@pytest.mark.parametrize(("precision", "tolerance"), [(FP32, 1e-5), (BF16, 1e-2)])
def test_evaluation_mode_in_other_precisions_follows_the_cast_modules(precision, tolerance):
    trio = trio_of(norm_model, precision, training=False)
    trio.models = [cast_module(model, precision) for model in trio.models]
    check(trio, torch.randn(K, BATCH, 3, 6, 6, dtype=precision.compute), tolerance)


def test_batch_norm_without_running_statistics_normalises_by_the_batch_as_the_module_does():
    trio = trio_of(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)))
    check(trio, torch.randn(K, 5, 3, 4, 4, dtype=torch.float64))


def test_graphs_of_training_and_of_evaluation_are_kept_apart():
    model, example = norm_model().double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    programs = [exported(model, example, FP64, training) for training in (True, False)]
    assert programs[0] is not programs[1]
    assert [exported(model, example, FP64, training) for training in (True, False)] == programs
    assert exported(model, example, FP64) is programs[0]


def test_bank_that_is_not_for_training_has_weights_and_buffers_alone():
    bank = ReplicaBank(
        norm_model(), K, device=CPU, precision=FP64, state_names=("momentum",), order="blocks", training=False
    )
    assert all(isinstance(rows, Rows) for rows in (bank.gradients, bank.corrections, bank.state["momentum"]))
    assert bank.gradients.storage.numel() == bank.corrections.storage.numel() == 0
    assert bank.state["momentum"].storage.numel() == 0
    assert bank.z is bank.z_prev is bank.total
    assert not bank.module(0).training
    for learner in range(K):
        for name, value in norm_model().double().named_parameters():
            torch.testing.assert_close(bank.learner_state(learner)[name], value.detach())
