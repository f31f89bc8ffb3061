"""What autograd does only backwards: models whose graph would train otherwise than they do, refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from crossbow_py.averaging import SMA, Independent
from crossbow_py.calibration import RememberedChoices
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.graph import FusionError
from crossbow_py.engine.precision import BF16, FP32, FP64
from crossbow_py.errors import UserError
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


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Clamp(torch.autograd.Function):
    """Does nothing but for large gradients, which first batches need not have."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-5, 5)


class Square(torch.autograd.Function):
    """A backward pass of its own that is what autograd's would be."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.between(self.first(x).tanh()))


def hooked_in_forward(x):
    x.register_hook(lambda gradient: gradient * 2)
    return x


class BackwardHook(Net):
    def __init__(self):
        super().__init__()
        self.first.register_full_backward_hook(lambda module, inputs, outputs: None)


class Counts(Net):
    """Its forward is another one after some calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class SetsUpOnce(Net):
    """Its first call keeps something that stays."""

    def __init__(self):
        super().__init__()
        self.width = None

    def forward(self, x):
        self.width = x.shape[1]
        return super().forward(x)


REFUSED = {
    "straight-through": (lambda: Net(Sign.apply), r"first\.\w+ is off by 100%.*Sign \(test_agreement\.py:\d+\)"),
    "reversal": (lambda: Net(Reversal.apply), r"first\.\w+ is off by 200%.*Reversal"),
    "clamp": (lambda: Net(Clamp.apply), r"the backward pass of Clamp .* is not linear"),
    "hook in forward": (lambda: Net(hooked_in_forward), r"it hooks its gradients at test_agreement\.py:\d+"),
    "backward hook": (BackwardHook, "first has a hook on its backward pass"),
    "count": (Counts, "its forward changes calls"),
}


@pytest.mark.parametrize("precision", [FP64, FP32, BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("name", REFUSED)
def test_graph_without_what_the_model_does_backwards_is_refused_by_name(name, precision):
    make_model, reason = REFUSED[name]
    with pytest.raises(FusionError, match=reason) as refused:
        EXECUTORS["fused"](make_tasks(make_model, order="blocks", precision=precision))
    assert "\n" not in str(refused.value)


def recomputed(x):
    return checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize("rule", [SMA(), Independent()], ids=lambda rule: rule.NAME)
@pytest.mark.parametrize(
    "make_model",
    [lambda: Net(Square.apply), lambda: Net(recomputed), SetsUpOnce],
    ids=["its own right backward", "checkpoint", "set up once"],
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


def test_auto_goes_on_to_executors_that_give_the_models_gradients(monkeypatch):
    monkeypatch.setattr(RememberedChoices, "recall", lambda choices, key: None)
    parts = make_trainer(model=lambda: Net(Sign.apply), executor="auto").run.parts
    assert parts.choices.executor in ("serial", "threads")
    why = "Executors fused and fused_threads are left out: its graph gives other numbers"
    assert any(note.startswith(why) for note in parts.warnings), parts.warnings


def test_fused_asked_for_by_name_is_refused_before_training():
    with pytest.raises(UserError, match=r"executor=fused cannot run this model: its graph .*; set executor=auto\.$"):
        make_trainer(model=lambda: Net(Reversal.apply), executor="fused")


def test_model_trains_by_a_graph_as_by_its_module_where_the_loss_draws_numbers():
    def noisy(output, targets):
        return nn.functional.cross_entropy(output + torch.randn_like(output), targets)

    tasks = make_tasks(Net, order="blocks")
    tasks.loss = noisy
    EXECUTORS["fused"](tasks).close()
