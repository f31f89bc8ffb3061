"""What autograd does only backwards: models whose graph would train otherwise than they do, refused by name."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from crossbow_py.engine.trust import assumed
from crossbow_py.engine.trust.compare import least_precise
from tests.support import make_tasks
from tests.trainers import make_trainer


class Sign(torch.autograd.Function):
    """Straight through: the gradient of the output is the input's."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.between(self.first(x).tanh()))


def hooked_at_its_node(x):
    x.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-1e6, 1e6),))  # which does nothing here
    return x


class CountsInItsClass(Net):
    calls = 0

    def forward(self, x):
        CountsInItsClass.calls += 1
        return super().forward(x)


class CountsElsewhere(Net):
    """Its forward is another one after some calls, which it counts in an object."""

    def __init__(self):
        super().__init__()
        self.schedule = SimpleNamespace(steps=[0])

    def forward(self, x):
        self.schedule.steps[0] += 1
        return super().forward(x) / self.schedule.steps[0]


class SkipsSometimes(nn.Module):
    """Layers that are dropped by a generator of Python's that belongs to the model."""

    def __init__(self):
        super().__init__()
        self.dice = random.Random(0)

    def forward(self, x):
        return x if self.dice.random() < 0.5 else x * 2


class Remembers(Net):
    """Takes part of what it gave the last time."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x):
        output = super().forward(x) + self.last
        self.last = output.detach().mean(0)
        return output


class KeepsToLookAt(Net):
    """Nothing it keeps is read again."""

    def forward(self, x):
        self.seen = super().forward(x)
        return self.seen


class SetsUpOnce(Net):
    """Its first call keeps something that stays."""

    def __init__(self):
        super().__init__()
        self.width = None

    def forward(self, x):
        self.width = x.shape[1]
        return super().forward(x)


REFUSED = {
    "straight-through": (
        lambda: Net(Sign.apply),
        r"it has a backward pass of its own, Sign \(test_agreement\.py:\d+\), and a graph has none",
    ),
    "hook at a node": (lambda: Net(hooked_at_its_node), r"it hooks its gradients at test_agreement\.py:\d+"),
    "count in its class": (CountsInItsClass, r"its forward changes CountsInItsClass\.calls"),
    "count in an object": (CountsElsewhere, "its forward changes schedule"),
    "numbers of its own": (lambda: Net(SkipsSometimes()), "its forward changes between.dice"),
    "tensor from the pass before": (Remembers, "a second pass on the same batch differs"),
}


@pytest.mark.parametrize("precision", [FP64, FP32, BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("name", REFUSED)
def test_graph_without_what_the_model_does_backwards_is_refused_by_name(name, precision):
    make_model, reason = REFUSED[name]
    with pytest.raises(FusionError, match=reason) as refused:
        EXECUTORS["fused"](make_tasks(make_model, order="blocks", precision=precision))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
def test_model_that_is_another_by_three_percent_while_it_is_exported_is_refused(precision):
    net = lambda: Net(lambda x: x * (1.03 if torch.compiler.is_exporting() else 1.0))  # noqa: E731
    with pytest.raises(FusionError, match="its graph gives other numbers than the model itself"):
        EXECUTORS["fused"](make_tasks(net, order="blocks", precision=precision))


def recomputed(x):
    return checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize("rule", [SMA(), Independent()], ids=lambda rule: rule.NAME)
@pytest.mark.parametrize(
    "make_model",
    [lambda: Net(recomputed), SetsUpOnce, KeepsToLookAt],
    ids=["checkpoint", "set up once", "kept to look at"],
)
def test_graph_with_the_models_own_gradients_is_taken(make_model, rule):
    tasks = make_tasks(make_model, order="blocks", rule=rule)
    before = copy.deepcopy(tasks.bank.template.state_dict())
    EXECUTORS["fused"](tasks).close()
    assert all(torch.equal(before[name], value) for name, value in tasks.bank.template.state_dict().items())


def test_comparison_leaves_learners_their_weights_buffers_and_random_numbers():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    tasks, untouched = (make_tasks(make, order="blocks") for _ in range(2))
    torch.manual_seed(1)
    drawn = torch.random.get_rng_state()
    EXECUTORS["fused"](tasks).close()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for learner in range(2):
        ours, theirs = tasks.bank.learner_state(learner), untouched.bank.learner_state(learner)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_auto_goes_on_to_executors_that_give_the_models_gradients():
    with assumed("executor", None):
        parts = make_trainer(model=lambda: Net(Sign.apply), executor="auto").run
    assert parts.choices.executor in ("serial", "threads")
    why = "Executors fused, fused_threads are not used: it has a backward pass of its own, Sign"
    assert any(note.startswith(why) for note in parts.warnings), parts.warnings


def test_fused_asked_for_by_name_is_refused_before_training():
    with pytest.raises(UserError, match=r"executor=fused cannot run this model: it has .*; set executor=auto\.$"):
        make_trainer(model=lambda: Net(Sign.apply), executor="fused")


def test_model_trains_by_a_graph_as_by_its_module_where_the_loss_draws_numbers():
    def noisy(output, targets):
        return nn.functional.cross_entropy(output + torch.randn_like(output), targets)

    tasks = make_tasks(Net, order="blocks")
    tasks.loss = noisy
    EXECUTORS["fused"](tasks).close()


def test_gradient_that_is_further_from_float32_than_the_other_way_in_its_format_is_named():
    generator = torch.Generator().manual_seed(0)
    precise = {f"the gradient of {name}": torch.randn(64, generator=generator) for name in "abcd"}
    precise["buffer n"] = torch.zeros(1)

    def off(share, **others):
        return {name: value * (1 + others.get(name[-1], share)) for name, value in precise.items()}

    assert least_precise(off(0.2), off(0.1), precise, torch.bfloat16) is None  # both are about as far
    assert least_precise(off(1e-3), off(0.0), precise, torch.bfloat16) is None  # less than a rounding of the whole
    assert str(least_precise(off(0.1, c=-0.8), off(0.1), precise, torch.bfloat16)) == "the gradient of c is off by 80%"
    assert least_precise(off(0.1, c=float("nan")), off(0.1), precise, torch.bfloat16).name == "the gradient of c"
