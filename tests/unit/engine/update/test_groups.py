"""Groups of parameters: every executor and update against torch's optimizers with `param_groups` in a plain loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent, SynchronousSGD
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.layout import parameter_layout
from crossbow_py.engine.modules.precision import FP32, FP64
from crossbow_py.engine.update.device_update import DeviceUpdate, knows
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon, Optimizer
from crossbow_py.engine.update.row_update import TorchUpdate
from tests import support
from tests.support import CPU, IMAGES, assert_learners_equal, make_tasks, run_rounds

GROUPS = (
    ParameterGroup("head.weight", rate=5.0),
    ParameterGroup("features.3.*", frozen=True),
    ParameterGroup("features", rate=0.3, weight_decay=0.2),
    ParameterGroup("*.bias", rate=0.0),  # what is left of the head
)
CLIPPED = (
    ParameterGroup("head", rate=2.0, clip_norm=0.05),
    ParameterGroup("features.1", clip_norm=0.02, weight_decay=0.1),
)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Tanh(), nn.Flatten()
        )
        self.middle, self.head = nn.Linear(24, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.middle(self.features(x)).tanh())


def torch_groups(model, optimizer):
    """The `param_groups` of torch that mean the same, and the parameters that are clipped together, with limits."""
    options, clipped = [], {}
    for name, parameter in model.named_parameters():
        group = next((own for own in optimizer.groups if own.matches(name)), ParameterGroup("*"))
        parameter.requires_grad_(not group.frozen)
        decays = parameter.ndim > 1 or optimizer.decay_norm_and_bias
        decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
        rate = optimizer.learning_rate * group.rate
        options.append({"params": [parameter], "lr": rate, "weight_decay": decay if decays else 0.0})
        limit = group.clip_norm or optimizer.clip_norm
        clipped.setdefault((group.names if group.clip_norm else None, limit), []).append(parameter)
    return options, clipped


def plain_loop(optimizer, tasks, num_rounds, factor, dtype=torch.float64):
    """The model's parameters after a plain loop of torch, in float64."""
    model = Network().to(dtype)
    options, clipped = torch_groups(model, optimizer)
    if isinstance(optimizer, SGD):
        reference = torch.optim.SGD(options, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    else:
        reference = torch.optim.AdamW(options, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
    rates = [own["lr"] for own in reference.param_groups]
    for n in range(num_rounds):
        inputs, targets = tasks.feed.batch(n * tasks.feed.batch_size)
        reference.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(dtype)), targets).backward()
        for (_, limit), parameters in clipped.items():
            if limit is not None:
                nn.utils.clip_grad_norm_(parameters, limit)
        for own, rate in zip(reference.param_groups, rates, strict=True):
            own["lr"] = rate * factor(n)
        reference.step()
    return dict(model.named_parameters())


def assert_follows(tasks, expected, tolerance):
    for name, value in tasks.bank.weights.shaped(0).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=tolerance, atol=tolerance)


def factor(n):
    return 0.9**n


OPTIMIZERS = {
    "sgd": SGD(learning_rate=0.05, momentum=0.9, weight_decay=0.01, groups=GROUPS),
    "nesterov": SGD(learning_rate=0.05, nesterov=True, groups=GROUPS, decay_norm_and_bias=True, clip_norm=0.5),
    "adamw": AdamW(learning_rate=0.01, weight_decay=0.1, groups=GROUPS),
    "clipped sgd": SGD(learning_rate=0.05, groups=CLIPPED, clip_norm=0.1),
    "clipped adamw": AdamW(learning_rate=0.01, groups=CLIPPED),
}
UPDATES = {"fp64": (FP64, False, 1e-9), "fp32": (FP32, False, 2e-5), "native": (FP32, True, 2e-5)}


# Every optimizer with every update, learner by learner and, by native code, for all learners in one pass; and every
# executor with every update.
@pytest.mark.parametrize(
    ("executor", "order", "update", "name"),
    [
        *(("serial", "rows", update, name) for update in UPDATES for name in OPTIMIZERS),
        *(("serial", "blocks", "fp64", name) for name in OPTIMIZERS),
        *(("fused", "blocks", "native", name) for name in OPTIMIZERS),
        ("fused", "blocks", "fp64", "nesterov"),
        ("fused", "blocks", "fp32", "clipped adamw"),
        ("threads", "rows", "fp64", "clipped adamw"),
        ("threads", "rows", "fp32", "adamw"),
        ("threads", "rows", "native", "clipped sgd"),
        ("fused_threads", "blocks", "fp64", "clipped sgd"),
        ("fused_threads", "blocks", "fp32", "nesterov"),
        ("fused_threads", "blocks", "native", "adamw"),
    ],
)
def test_groups_follow_those_of_torch(executor, order, update, name, monkeypatch, two_cores):
    optimizer, (precision, native, tolerance) = OPTIMIZERS[name], UPDATES[update]
    if not native:
        monkeypatch.setattr(support, "choose_update", lambda optimizer, rule, *_: (TorchUpdate(optimizer, rule), None))
    tasks = make_tasks(
        Network, num_learners=1, rule=Independent(), optimizer=optimizer, data=IMAGES, order=order, precision=precision
    )
    assert (tasks.update.NAME == "native") is native
    rate = optimizer.learning_rate
    run_rounds(tasks, executor, 6, rate, factor)
    assert_follows(tasks, plain_loop(optimizer, tasks, 6, factor, precision.master), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "order", "rule", "groups"),
    [
        ("threads", "rows", SMA(), GROUPS),
        ("threads", "rows", SynchronousSGD(), CLIPPED),
        ("fused", "blocks", SMA(), CLIPPED),
        ("fused", "blocks", SynchronousSGD(), GROUPS),
        ("fused_threads", "blocks", SMA(), GROUPS),
        ("fused_threads", "blocks", SynchronousSGD(), CLIPPED),
    ],
)
def test_groups_of_several_learners_are_those_of_serial_with_torch_operators(
    executor, order, rule, groups, two_cores
):
    optimizer = SGD(learning_rate=0.05, weight_decay=0.01, groups=groups, clip_norm=0.3)
    serial, ours, native = (
        make_tasks(Network, num_learners=3, rule=rule, optimizer=optimizer, data=IMAGES, order=own, precision=precision)
        for own, precision in (("rows", FP64), (order, FP64), (order, FP32))
    )
    for tasks, name in ((serial, "serial"), (ours, executor), (native, executor)):
        run_rounds(tasks, name, 5, 0.05)
    assert (serial.update.NAME, native.update.NAME) == ("torch", "native")
    assert_learners_equal(ours.bank, serial.bank)
    for name, value in native.bank.z.shaped().items():
        torch.testing.assert_close(value.double(), serial.bank.z.shaped()[name], rtol=1e-3, atol=1e-4)


def test_rates_of_learners_are_multiplied_by_those_of_groups():
    optimizer = SGD(momentum=0.0, weight_decay=(0.0, 0.5), groups=({"names": "weight", "rate": 3.0},))
    tasks = make_tasks(rule=Independent(), optimizer=optimizer)
    before = tasks.bank.state_dict()["weights"]
    run_rounds(tasks, "serial", 1, 0.1)
    after, gradients = tasks.bank.state_dict()["weights"], tasks.bank.gradients.stacked(2)
    # The reference has added λ·w to gradients in place.
    torch.testing.assert_close(after["weight"], before["weight"] - 0.3 * gradients["weight"])
    torch.testing.assert_close(after["bias"], before["bias"] - 0.1 * gradients["bias"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "order", "precision", "others"),
    [
        *(("serial", "rows", precision, others) for precision in (FP64, FP32) for others in ("sgd", "adamw")),
        ("fused", "blocks", FP32, "sgd"),
        ("fused", "blocks", FP32, "adamw"),
        ("fused", "blocks", FP64, "adamw"),
        ("threads", "rows", FP32, "adamw"),
        ("fused_threads", "blocks", FP64, "sgd"),
    ],
)
def test_muon_takes_rates_and_decay_of_groups_for_matrices_and_others(executor, order, precision, others, two_cores):
    # Of two optimizers that differ in the groups' settings alone, each group follows the one that has them for all.
    given = {"other_optimizer": others, "other_learning_rate": 0.02, "momentum": 0.8}
    rates = (ParameterGroup("middle", rate=0.5, weight_decay=0.3), ParameterGroup("features.*", rate=0.5))
    tasks = {}
    for name, optimizer in {
        "groups": Muon(learning_rate=0.02, **given, groups=rates),
        "middle": Muon(learning_rate=0.02, weight_decay=0.3, other_weight_decay=0.3, **given),
        "others": Muon(learning_rate=0.02, **given),
    }.items():
        tasks[name] = make_tasks(
            Network, num_learners=2, rule=Independent(), optimizer=optimizer, data=IMAGES, order=order,
            precision=precision,
        )  # fmt: skip
        run_rounds(tasks[name], executor, 1, 0.02 if name != "middle" else 0.01)
    half = make_tasks(
        Network, num_learners=2, rule=Independent(), optimizer=Muon(learning_rate=0.02, **given), data=IMAGES,
        order=order, precision=precision,
    )  # fmt: skip
    run_rounds(half, executor, 1, 0.01)
    found = tasks["groups"].bank.stacked()
    sources = {"middle": tasks["middle"], "head": tasks["others"], "features": half}
    for name, value in found.items():
        expected = sources[name.partition(".")[0]].bank.stacked()[name]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["middle.weight"], tasks["others"].bank.stacked()["middle.weight"])


def test_parameters_of_a_kind_lie_in_the_order_of_their_groups():
    optimizer = SGD(groups=[{"names": "middle", "rate": 2}, {"names": "features.3", "rate": 3}])
    layout = parameter_layout(Network(), True, groups=optimizer.group_numbers(Network()))
    assert [(block.name, block.kind, block.group) for block in layout.blocks] == [
        ("features.0.weight", "decayed", 0), ("head.weight", "decayed", 0), ("middle.weight", "decayed", 1),
        ("features.3.weight", "decayed", 2), ("features.0.bias", "undecayed", 0), ("features.1.weight", "undecayed", 0),
        ("features.1.bias", "undecayed", 0), ("head.bias", "undecayed", 0), ("middle.bias", "undecayed", 1),
        ("features.3.bias", "undecayed", 2),
    ]  # fmt: skip
    assert layout.sections == (range(2), range(2, 3), range(3, 4), range(4, 8), range(8, 9), range(9, 10))


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ([{"names": "haed", "rate": 2}], "groups: haed matches no parameter of the model; did you mean 'head'"),
        ([{"names": "encoder.*"}], "encoder.* matches no parameter of the model; known: features, head, middle"),
        (
            [{"names": "head"}, {"names": "head.bias", "rate": 2}],
            "head.bias matches only parameters that groups before it have; put it before them",
        ),
        ([{"names": "*", "frozen": True}], "freezes all parameters of the model"),
    ],
)
def test_group_that_matches_nothing_is_refused(groups, refusal):
    with pytest.raises(UserError) as error:
        SGD(groups=groups).prepared(Network())
    assert refusal in str(error.value)


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ([{"names": "head", "lr": 2}], "unknown key optimizer.groups.lr"),
        ([{"rate": 2}], "has no names"),
        ([{"names": "head", "rate": -1}], "optimizer.groups.rate must be at least 0, got -1"),
        ([{"names": "head", "rate": 2, "frozen": True}], "head is frozen, so it has no rate"),
        ([3], "must be a list of mappings"),
        ("head", "must be a list of mappings"),
        ({"head": {"rate": 2}}, "must be a list of mappings"),
    ],
)
def test_settings_that_a_group_cannot_have_are_refused(groups, refusal):
    with pytest.raises(UserError) as error:
        SGD(groups=groups)
    assert refusal in str(error.value)


@pytest.mark.parametrize("optimizer", [SGD(groups=GROUPS), AdamW(groups=CLIPPED)])
def test_streams_refuse_groups_by_name_and_take_frozen_ones(optimizer: Optimizer):
    assert not knows(optimizer)
    with pytest.raises(UserError, match=r"optimizer.groups has others for some; set executor=fused or executor=serial"):
        DeviceUpdate(optimizer, SMA(), CPU)
    assert knows(dataclasses.replace(optimizer, groups=[{"names": "head", "frozen": True}]))
