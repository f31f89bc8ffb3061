"""Random small modules with all that autograd can be given: every executor trains as plain PyTorch does, or refuses."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from crossbow_py.averaging import Independent
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.train.checks.seeded_model import faithful_copy
from tests.support import features, make_tasks, plan
from tests.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
WIDTH, RATE, ROUNDS, LEARNERS = 5, 0.05, 4, 2
DATA = features(48, (WIDTH,))


def function(forward, backward):
    """A custom autograd function of one tensor."""
    return type("Custom", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": backward}).apply


def saved(ctx, x):
    ctx.save_for_backward(x)
    return x.sin()


straight_through = function(lambda ctx, x: (x * 4).round() / 4, staticmethod(lambda ctx, g: g))
reversal = function(lambda ctx, x: x.view_as(x), staticmethod(lambda ctx, g: -g))
clamped = function(lambda ctx, x: x.view_as(x), staticmethod(lambda ctx, g: g.clamp(-0.01, 0.01)))
honest = function(saved, staticmethod(lambda ctx, g: g * ctx.saved_tensors[0].cos()))


@torch.library.custom_op("crossbow_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 3)  # not what the value says


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.act(self.linear(x))

    def act(self, x):
        return x.tanh()


def block(act):
    """A class whose activation is a function of its module and the value."""
    return type("Acts", (Block,), {"act": act})


class Scalar(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def act(self, x):
        return x * self.scale.exp()


class Writes(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def act(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.2)
        self.count += 1
        return (x - self.mean).tanh()


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def act(self, x):
        return self.norm(x).relu_()


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def act(self, x):
        self.calls += 1
        return x / self.calls


class HoldsItself(Block):
    def __init__(self):
        super().__init__()
        self.own = lambda x: self.linear(x).tanh()

    def forward(self, x):
        return self.own(x)


class Doubles(nn.Module):
    def forward(self, weight):
        return straight_through(weight)


def double_inputs(module, inputs, outputs):
    """A hook: of the gradients of inputs the first layer has none."""
    return tuple(None if each is None else each * 2 for each in inputs)


def with_hook(register):
    def make():
        made = Block()
        register(made)
        return made

    return make


def hooked(x):
    x.register_hook(lambda gradient: gradient * 0.5)
    return x.tanh()


def without_gradient(x):
    with torch.no_grad():
        scale = x.abs().mean(1, keepdim=True)
    return (x / (scale + 1)).tanh()


BLOCKS = {
    "plain": Block,
    "scalar": Scalar,
    "writes": Writes,
    "normed": Normed,
    "counts": Counts,
    "holds itself": HoldsItself,
    "straight through": block(lambda self, x: straight_through(x)),
    "reversal": block(lambda self, x: reversal(x)),
    "clamped": block(lambda self, x: clamped(x)),
    "honest": block(lambda self, x: honest(x)),
    "custom operator": block(lambda self, x: doubled(x).tanh()),
    "checkpoint": block(lambda self, x: checkpoint(torch.tanh, x, use_reentrant=False)),
    "old checkpoint": block(lambda self, x: checkpoint(torch.tanh, x, use_reentrant=True)),
    "in place": block(lambda self, x: x.mul_(0.9).add_(0.1).tanh_()),
    "indexed": block(lambda self, x: torch.where(x > 0, x, x[:, torch.tensor([4, 3, 2, 1, 0])])),
    "detached": block(lambda self, x: x.sigmoid() * x.detach() + x),
    "no gradient": block(lambda self, x: without_gradient(x)),
    "hook in forward": block(lambda self, x: hooked(x)),
    "forward hook": with_hook(lambda m: m.linear.register_forward_hook(lambda own, inputs, output: output * 2)),
    "forward pre-hook": with_hook(lambda m: m.linear.register_forward_pre_hook(lambda own, inputs: inputs[0] + 1)),
    "backward hook": with_hook(lambda m: m.linear.register_full_backward_hook(double_inputs)),
    "backward pre-hook": with_hook(lambda m: m.linear.register_full_backward_pre_hook(lambda own, o: (o[0] * 2,))),
    "weight hook": with_hook(lambda m: m.linear.weight.register_hook(lambda gradient: gradient * 2)),
    "spectral norm": with_hook(lambda m: parametrizations.spectral_norm(m.linear)),
    "weight norm": with_hook(lambda m: parametrizations.weight_norm(m.linear)),
    "quantised weight": with_hook(lambda m: parametrize.register_parametrization(m.linear, "weight", Doubles())),
    "frozen": with_hook(lambda m: m.linear.bias.requires_grad_(False)),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, names, shares):
        super().__init__()
        self.layers = nn.Sequential(*(BLOCKS[name]() for name in names))
        if shares and all("weight" in layer.linear._parameters for layer in (self.layers[0], self.layers[-1])):
            self.layers[-1].linear.weight = self.layers[0].linear.weight
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def random_net(seed):
    """Names of blocks, and what makes such a network, the same every time."""
    dice = random.Random(seed)
    names = [dice.choice(list(BLOCKS)) for _ in range(dice.randint(1, 3))]
    shares = dice.random() < 0.3

    def make():
        torch.manual_seed(seed)
        return Net(names, shares)

    return names, make


def trained_plainly(make, tasks, learner):
    """Weights and buffers after the rounds, by a loop of one's own over the model itself."""
    model = make().double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tasks.bank.learner_state(learner)[name])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for n in range(ROUNDS):
        batch = tasks.feed.batch(plan(tasks, n).starts[learner])
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        model.zero_grad()
        loss.backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=RATE)
    return dict(model.state_dict())


def tasks_for(make):
    """Two learners with weights of their own."""
    tasks = make_tasks(make, data=DATA, rule=Independent(), optimizer=SGD(momentum=0.0, weight_decay=0.0))
    with torch.no_grad():
        for name, rows in tasks.bank.weights.shaped(1).items():
            rows.mul_(1.1 if name.endswith("weight") else 0.9)
    return tasks


def outcome(make, executor):
    """`equal`, `different: what`, or `refused: why`."""
    try:
        copied = faithful_copy(make().double(), FP64, Batch(*(each[:4] for each in DATA)), channels_last=True)
    except UserError as error:
        return f"refused: {error}"
    tasks = tasks_for(lambda: copied)
    expected = [trained_plainly(make, tasks, learner) for learner in range(LEARNERS)]
    try:
        runner = EXECUTORS[executor](tasks)
    except FusionError as error:
        return f"refused: {error}"
    for n in range(ROUNDS):
        runner.submit(plan(tasks, n, RATE))
    runner.drain()
    runner.close()
    for learner, reference in enumerate(expected):
        own = tasks.bank.learner_state(learner)
        for name, value in own.items():
            if not (value - reference[name]).double().norm() <= 1e-8 * (value.double().norm() + 1e-3):
                return f"different: {name}"
    return "equal"


def examine(seeds):
    """Outcomes by executor, and whatever is silently wrong."""
    counts, wrong = Counter(), []
    for seed in seeds:
        names, make = random_net(seed)
        for executor in ("serial", "threads", "fused", "fused_threads"):
            found = outcome(make, executor)
            counts[executor, found.split(":")[0]] += 1
            if found.startswith("different"):
                wrong.append((seed, names, executor, found))
    return counts, wrong


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_every_kind_of_block_trains_as_in_pytorch_or_is_refused(name, executor):
    found = outcome(lambda: (torch.manual_seed(0), Net([name], shares=False))[1], executor)
    never = {"weight hook", "holds itself", "old checkpoint"}  # which torch.autograd.grad does not support
    customs = ("straight through", "reversal", "clamped", "quantised weight", "honest")
    backwards = {
        **dict.fromkeys(customs, "it has a backward pass of its own, Custom, and a graph has none"),
        **dict.fromkeys(("backward hook", "backward pre-hook"), "layers.0.linear has a hook on its backward pass"),
        "counts": "its forward changes layers.0.calls",
        "hook in forward": "it hooks its gradients at test_autograd_property.py:",
    }
    reason = "" if name in never else backwards.get(name) if executor == "fused" else None
    assert found == "equal" if reason is None else found.startswith(f"refused: {reason}"), found
    assert "\n" not in found


@pytest.mark.slow
def test_random_modules_train_as_in_pytorch_or_are_refused():
    _, wrong = examine(range(12))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", [range(12, 62), pytest.param(range(62, 312), marks=pytest.mark.long)], ids=len)
def test_many_random_modules_train_as_in_pytorch_or_are_refused(seeds, capsys):
    counts, wrong = examine(seeds)
    with capsys.disabled():
        print(f"\nrandom modules: {len(wrong)} silently different; {dict(counts)}")
    assert wrong == []
