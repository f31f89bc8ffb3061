"""Side effects of models and losses: refused or warned about, before training or as it begins."""

from __future__ import annotations

import copy
import cProfile
import functools
import logging
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from crossbow_py import SGD, SMA, Independent
from crossbow_py.core.errors import UserError
from tests.networks import Net, net
from tests.trainers import Recorder, equal_states, images, make_trainer

_F = nn.functional


class Later(Net):
    """A model that counts its passes in a buffer, which evaluations restore."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def count(self):
        if self.training:
            self.passes += 1
        return int(self.passes)


class MomentumEncoder(Net):
    def __init__(self):
        super().__init__()
        self.key = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for own, key in zip(self.first.parameters(), self.key.parameters(), strict=True):
                    key.mul_(0.9).add_(own, alpha=0.1)
        return self.second((self.first(x) - self.key(x)).tanh())


class ReplacesKey(MomentumEncoder):
    def forward(self, x):
        self.key.weight.data = self.key.weight.data * 0.9
        return Net.forward(self, x)


class Clips(Net):
    def forward(self, x):
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class SetsState(Net):
    """A model that draws the same noise twice."""

    def forward(self, x):
        state = torch.get_rng_state()
        first = torch.rand(x.shape)
        torch.set_rng_state(state)
        return super().forward(x + first - torch.rand(x.shape))


class SetsSeed(Net):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return super().forward(x * torch.rand(4))


class SharesMemory(Net):
    def __init__(self):
        super().__init__()
        self.third = nn.Linear(4, 6)
        self.third.weight.data = self.first.weight.data

    def forward(self, x):
        return super().forward(x) + self.second(self.third(x))


class ViewsWeight(Net):
    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(self.first.weight.data[1:3])

    def forward(self, x):
        return super().forward(x) + self.part.sum()


class Thaws(Later):
    def forward(self, x):
        self.first.requires_grad_(self.count() > 4)
        return super().forward(x)

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class Freezes(Later):
    def forward(self, x):
        self.first.requires_grad_(self.count() < 4)
        return super().forward(x)


class ReplacesLater(Later):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        output = super().forward(x)
        if self.count() > 4:
            self.seen = 0.5 * self.seen + 0.5 * output.detach().mean(0)
        return output + self.seen


class DrawsLater(Later):
    seed = 0

    def forward(self, x):
        passes = self.count()
        if passes == 6:
            torch.manual_seed(self.seed)  # what torch's own generator stands at is of no importance any more
        return _F.dropout(super().forward(x), 0.5, self.training and passes > 4)


class DropsLayer(Later):
    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.count() > 4:
            hidden = hidden.detach()
        return self.second(hidden)


class TensorKept(Net):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x):
        output = super().forward(x) + self.mean
        self.mean = 0.5 * self.mean + output.detach().mean(0)
        return output


class CountsInClass(Net):
    calls = 0

    def forward(self, x):
        CountsInClass.calls += 1
        return super().forward(x)


class MakesAMask(Net):
    """A model that makes a mask in its first pass, which is not state."""

    mask = None

    @functools.cached_property
    def scale(self):
        return 2.0

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(3)
        return super().forward(x) * self.mask * self.scale


class Columns(nn.Module):
    """A model with two parameters in one piece of memory that share no value."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(half) for half in torch.randn(4, 6).chunk(2, dim=1))

    def forward(self, x):
        return x @ self.left + (x @ self.right).tanh()


class SeedsDropout(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.drop(super().forward(x))


class ClipsNorm(nn.Sequential):
    """A model that clips BatchNorm's parameters, which are not copies in bf16."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        with torch.no_grad():
            self[1].weight.clamp_(max=0.5)
        return super().forward(x)


class WritesLater(MomentumEncoder, Later):
    """A model whose frozen weights change from the fourth pass on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x):
        return super().forward(x) if self.count() > 3 else Net.forward(self, x)


SPARSE_BUFFER = net(
    lambda self, x: Net.forward(self, torch.sparse.mm(self.edges, x.t()).t()),
    edges=lambda: nn.Buffer(torch.eye(4).to_sparse()),
)
REPLACES_BUFFER = net(
    lambda self, x: setattr(self, "seen", self.seen + 1) or Net.forward(self, x), seen=lambda: nn.Buffer(torch.zeros(1))
)
OWN_GENERATOR = net(
    lambda self, x: Net.forward(self, x) + torch.rand(3, generator=self.own),
    own=lambda: torch.Generator().manual_seed(1),
)


class Strides(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, 3)

    def forward(self, x):
        return self.linear(x.as_strided((len(x), 192), (192, 1)))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (MomentumEncoder, {}, "writes its frozen parameter key.weight, which all learners share"),
        (MomentumEncoder, {"num_learners": 1, "precision": "bf16"}, "key.weight, which in bf16 is a copy of .*=fp32"),
        (ReplacesKey, {"num_learners": 1}, "gives its parameter key.weight other memory"),
        (Clips, {"precision": "bf16"}, "writes its parameter second.weight, which in bf16 is a copy"),
        (SetsState, {}, r"sets torch's generator at test_models_habits.py:\d+ and draws"),
        (SetsSeed, {}, r"sets torch's generator at test_models_habits.py:\d+ and draws"),
        (SharesMemory, {}, "first.weight and third.weight share memory"),
        (ViewsWeight, {}, "the model's first.weight and part share memory"),
        (SeedsDropout, {}, r"sets torch's generator at test_models_habits.py:\d+ and draws"),
        (SPARSE_BUFFER, {}, "buffer edges is sparse, and learners' buffers are dense; register buffer.to_dense"),
        (REPLACES_BUFFER, {}, r"forward replaces its buffer seen.*copy_\(\)"),
        (Strides, {"train_data": images(40)}, "learners, copies of the model, would not train as it does"),
    ],
)
def test_model_that_learners_cannot_follow_is_refused_before_training(model, options, message):
    with pytest.raises(UserError, match=message) as refused:
        make_trainer(model=model, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Thaws, "changes requires_grad of its parameter first.weight"),
        (Freezes, "changes requires_grad of its parameter first.weight"),
        (ReplacesLater, "replaces its buffer seen"),
        (WritesLater, "writes its frozen parameter key.weight"),
    ],
)
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_model_that_strays_from_its_row_later_ends_the_run(model, message, executor):
    trainer = make_trainer(model=model, executor=executor)
    with pytest.raises(UserError, match=message):
        trainer.fit(max_epochs=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net(lambda self, x: Net.forward(self, x) * random.random()), "from Python's or NumPy's generator"),
        (net(lambda self, x: Net.forward(self, x) * np.random.rand()), "from Python's or NumPy's generator"),
        (OWN_GENERATOR, "changes its attribute own"),
        (TensorKept, "A second pass of the model over the same batch gives another output"),
        (CountsInClass, "changes its attribute CountsInClass.calls"),
        (net(unused=lambda: nn.Linear(4, 4)), "unused.bias and 1 more got no gradient in a round. It counts as zero"),
        (Clips, "forward writes its parameter second.weight: every learner writes its own"),
        (net(count=lambda: nn.Buffer(torch.zeros((), dtype=torch.float64))), "buffer count is float64, but float32 in"),
        (Net, None),
        (MakesAMask, None),
        (net(lambda self, x: self.log.debug("forward") or Net.forward(self, x), log=logging.getLogger), None),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)), None),
        (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))), None),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))), None),
        (Columns, None),
    ],
)
def test_what_a_model_does_besides_is_said_once_before_training(model, message):
    recorder = Recorder()
    make_trainer(model=model, callbacks=[recorder]).fit(max_rounds=3)
    found = [line for line in recorder.of("message") if "model" in line]
    assert found == [] if message is None else len(found) == 1 and message in found[0]


def test_clipped_weights_of_a_single_learner_are_as_in_plain_pytorch():
    result = make_trainer(model=Clips, num_learners=1, optimizer=SGD(learning_rate=0.0)).fit(max_rounds=2)
    assert result.model.second.weight.abs().max() <= 0.1


def test_weights_written_later_in_bf16_end_the_run():
    class ClipsLater(Later):
        def forward(self, x):
            if self.count() > 3:
                with torch.no_grad():
                    self.second.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(UserError, match="second.weight, which in bf16 is a copy"):
        make_trainer(model=ClipsLater, precision="bf16").fit(max_epochs=1)


def test_batchnorms_weights_are_clipped_in_bf16():
    result = make_trainer(
        model=ClipsNorm, num_learners=1, precision="bf16", optimizer=SGD(learning_rate=0.0)
    ).fit(max_epochs=1)  # fmt: skip
    assert result.model[1].weight.max() == 0.5


def test_models_are_tried_beside_a_profiler_which_goes_on_after():
    profile = cProfile.Profile()
    profile.enable()
    before = sys.getprofile()
    try:
        with pytest.raises(UserError, match="sets torch's generator"):
            make_trainer(model=SetsSeed)
        assert sys.getprofile() is before
    finally:
        profile.disable()


def test_loss_may_write_into_outputs():
    def written(output, targets):
        output /= 2
        return _F.cross_entropy(output, targets)

    make_trainer(loss=written).fit(max_rounds=1)


def test_momentum_encoders_of_independent_learners_train_on():
    trainer = make_trainer(model=MomentumEncoder, averaging=Independent())
    before = trainer.run.bank.learner_state(0)["key.weight"].clone()
    trainer.fit(max_epochs=1)
    assert not torch.equal(trainer.run.bank.learner_state(0)["key.weight"], before)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_model_that_begins_to_draw_is_said_once_and_then_draws_its_learners_numbers(executor, monkeypatch):
    ended = []
    for seed in (1, 2):
        recorder = Recorder()
        monkeypatch.setattr(DrawsLater, "seed", seed)
        trainer = make_trainer(model=DrawsLater, executor=executor, num_learners=1, callbacks=[recorder])
        torch.manual_seed(0)
        result = trainer.fit(max_rounds=9)  # the fifth is the first that draws
        assert sum("has begun to draw random numbers" in line for line in recorder.of("message")) == 1
        ended.append(result.model)
    assert equal_states(*ended)


def test_gradient_that_stops_later_is_said_in_the_round():
    recorder = Recorder()
    make_trainer(model=DropsLayer, callbacks=[recorder]).fit(max_rounds=8)
    assert sum("The model's first.bias and 1 more got no gradient" in line for line in recorder.of("message")) == 1


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.register_buffer("calls", torch.tensor(0.0))
        self.count = 0

    def forward(self, output, targets):
        return _F.cross_entropy(output @ self.weight, targets)


def test_loss_that_holds_a_parameter_in_disguise_is_refused():
    margin, made = Margin(), []

    def model():
        made.append(Net())
        return made[-1]

    def penalised(output, _):
        return output.sum() + made[0].first.weight.square().sum()

    def hiding(output, targets):
        return margin(output, targets)

    for loss in (hiding, margin.forward, penalised):
        with pytest.raises(UserError, match="the loss depends on a parameter of shape"):
            make_trainer(model=model, loss=loss)


def _drawing(output, targets):
    return _F.cross_entropy(output + torch.randn_like(output), targets)


class Counting(Margin):
    def forward(self, output, targets):
        self.count += 1
        return _F.cross_entropy(output, targets) / self.count


class Remembering(Margin):
    def forward(self, output, targets):
        self.calls += 1
        return _F.cross_entropy(output, targets) / self.calls


class Keeps:
    def __init__(self):
        self.kept = torch.zeros((), dtype=torch.bfloat16)

    def loss(self, output, targets):
        self.kept = self.kept + 1
        return _F.cross_entropy(output, targets)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: _drawing, "The loss draws random numbers"),
        (Counting, "The loss changes its count, which all learners share"),
        (Remembering, "The loss changes its calls, which all learners share"),
        (lambda: Keeps().loss, "The loss changes its kept, which all learners share"),
        (lambda: partial(_drawing), "The loss draws random numbers"),
    ],
)
def test_loss_that_does_more_than_compute_is_said(loss, message):
    recorder = Recorder()
    made = loss()
    if isinstance(made, nn.Module):
        made.requires_grad_(False)
    make_trainer(loss=made, callbacks=[recorder]).fit(max_rounds=1)
    assert sum(message in line for line in recorder.of("message")) == 1
    assert not isinstance(made, Counting) or made.count == 2  # a call for each learner, none from trying it


def test_constants_in_buffers_are_the_same_in_the_average_of_any_number_of_learners():
    least, tenth = torch.full((3,), torch.finfo(torch.float32).min), torch.full((16,), 0.1)
    masked = net(
        lambda self, x: torch.maximum(Net.forward(self, x), self.least),
        least=lambda: nn.Buffer(least.clone()), tenth=lambda: nn.Buffer(tenth.clone()),
    )  # fmt: skip
    for learners in (2, 7):
        result = make_trainer(model=masked, num_learners=learners, averaging=SMA()).fit(max_rounds=2)
        assert torch.equal(result.model.least, least) and torch.equal(result.model.tenth, tenth)


def test_layer_that_train_freezes_is_frozen_from_the_start():
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.first.requires_grad_(False)
            return self

    trainer = make_trainer(model=Frozen)
    weights = trainer.run.bank.learner_state(0)["first.weight"].clone()
    result = trainer.fit(max_epochs=1)
    assert torch.equal(result.model.first.weight, weights)


class DropsMaps(nn.Module):
    """A model that drops values of channels-last maps, where the same draws land on other values."""

    def __init__(self, noise):
        super().__init__()
        self.conv, self.head, self.noise = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 3), noise

    def forward(self, x):
        return self.head(self.noise(self.conv(x).relu()).flatten(1))


@pytest.mark.parametrize(
    "noise",
    [lambda y: _F.dropout(y, 0.1), lambda y: y + torch.randn_like(y), lambda y: _F.alpha_dropout(y, 0.1, True)],
    ids=["dropout", "noise", "alpha dropout"],
)
@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_maps_that_are_drawn_on_outside_of_modules_are_no_reason_to_refuse(executor, noise):
    make_trainer(model=lambda: DropsMaps(noise), train_data=images(40), executor=executor).fit(max_rounds=2)


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, torch.inference_mode],
    ids=["autocast", "no_grad", "inference_mode"],
)  # fmt: skip
def test_modes_that_the_caller_has_entered_change_nothing(mode, executor):
    def trained():
        return make_trainer(model=Net, executor=executor, optimizer=SGD(learning_rate=0.2)).fit(max_rounds=12).model

    plain = trained()
    with mode():
        within = trained()
        assert torch.is_grad_enabled() is isinstance(mode(), torch.autocast)
    assert equal_states(plain, within)


def test_callback_that_leaves_gradients_off_ends_no_run():
    careless = Recorder()
    careless.on_epoch = lambda record: torch.set_grad_enabled(False)
    assert make_trainer(model=Net, callbacks=[careless]).fit(max_epochs=2).summary.epochs == 2


def test_trainers_that_threads_build_at_once_begin_with_their_seeds_weights():
    def weights(seed):
        return make_trainer(model=Net, seed=seed).run.bank.z.shaped()["first.weight"].clone()

    alone = [weights(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(weights, range(4)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_buffer_that_a_first_pass_resizes_is_refused_with_the_remedy():
    class Observes(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            if len(self.scale) == 1:
                self.scale.resize_(4).fill_(1)
            return super().forward(x * self.scale)

    with pytest.raises(UserError, match="buffer scale has another shape after a first pass; run the model once"):
        make_trainer(model=Observes)


def test_model_without_values_is_refused():
    def unmade():
        with torch.device("meta"):
            return Net()

    with pytest.raises(UserError, match="first.weight is on the device meta, and has no values"):
        make_trainer(model=unmade)
