"""Learners are copies of the model: what a copy would lose is refused before anything is trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from crossbow_py import Augmentation, Trainer
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch
from crossbow_py.engine.device.host import intra_op_threads
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.models import MODELS
from crossbow_py.train.checks.seeded_model import faithful_copy
from tests.networks import Net, net
from tests.support import features
from tests.trainers import blobs, image_model, images, make_trainer


def hooked_weight():
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    return model


class HoldsItself(Net):
    """A model whose lambda still uses the original's layer after a copy."""

    def __init__(self):
        super().__init__()
        self.apply_first = lambda x: self.first(x).tanh()

    def forward(self, x):
        return self.second(self.apply_first(x))


class StoresInItself(Net):
    """A model whose hook still stores what it sees in the original after a copy."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())
        self.first.register_forward_hook(lambda module, inputs, output: setattr(self, "seen", output.detach()))

    def forward(self, x):
        return super().forward(x) + self.seen.mean()


class SharesMemory(Net):
    """A model with a second view of a weight's memory, which a learner's weight does not use."""

    def __init__(self):
        super().__init__()
        self.alias = self.first.weight.detach()

    def forward(self, x):
        return super().forward(x) + (x @ self.alias.t()).sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (hooked_weight, r"the model's first\.weight has a hook on its gradient"),
        (HoldsItself, r"would not train as it does \(the gradient of first\.\w+ is off by 100%\)"),
        (StoresInItself, "would not train as it does"),
        (SharesMemory, "would not train as it does"),
    ],
)
@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
def test_model_that_a_copy_would_not_train_as_is_refused_in_one_line(model, message, executor):
    with pytest.raises(UserError, match=message) as refused:
        make_trainer(model=model, executor=executor).fit(max_epochs=1)
    assert "\n" not in str(refused.value)


class Tied(Net):
    """A model with a tied and a frozen parameter, a buffer that forward writes, hooks and own methods."""

    def __init__(self):
        super().__init__()
        self.third = nn.Linear(6, 6)
        self.fourth = nn.Linear(6, 6)
        self.fourth.weight = self.third.weight
        self.fourth.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))
        self.first.register_forward_hook(lambda module, inputs, output: output * 2)
        self.activation = self.squash

    def squash(self, x):
        return self.fourth(self.third(x)).tanh()

    def forward(self, x):
        hidden = self.activation(self.first(x))
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.second(nn.functional.dropout(hidden - self.mean, 0.2, self.training))


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("name", ["tied", "image"])
def test_copy_of_an_honest_model_is_taken_and_leaves_it_as_it_was(name, precision):
    model = Tied() if name == "tied" else image_model()
    data = features(2) if name == "tied" else (images(2)[0].float(), images(2)[1])
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    copied = faithful_copy(model, precision, Batch(*data), channels_last=True)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(before[key], value) for key, value in copied.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [each.p for each in model.modules() if isinstance(each, nn.Dropout | nn.Dropout2d)] == (
        [] if name == "tied" else [0.2, 0.3]
    )


class Recomputes(Net):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def forward(self, x):
        return self.second(checkpoint(lambda y: self.drop(self.first(y)), x, use_reentrant=False))


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.functional.dropout], ids=["module", "function"])
def test_random_numbers_that_backward_would_draw_again_are_refused(drop):
    with pytest.raises(UserError, match=r"draws random numbers in what torch\.utils\.checkpoint computes again"):
        make_trainer(model=lambda: Recomputes(drop))


class Rotates(Net):
    """A model with a complex buffer, as rotary embeddings have, and a score that begins as NaN."""

    def __init__(self):
        super().__init__()
        self.best = float("nan")
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.tensor([0.1, 0.2, 0.3])))

    def forward(self, x):
        hidden = torch.view_as_complex(self.first(x).view(-1, 3, 2)) * self.turns
        return self.second(torch.view_as_real(hidden).flatten(1))


TAKES_BF16_ALONE = net(lambda self, x: self.second(self.first(x.to(torch.bfloat16)).tanh()))


@pytest.mark.parametrize(("model", "precision"), [(Rotates, "fp32"), (TAKES_BF16_ALONE, "bf16")])
@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_honest_model_of_an_odd_format_trains(model, precision, executor):
    trainer = make_trainer(model=model, precision=precision, executor=executor)
    trainer.fit(max_epochs=1)
    assert trainer.state.samples_seen == 40


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net(turns=lambda: nn.Parameter(torch.ones(6, dtype=torch.complex64))), "model's turns is complex, and"),
        (net(lambda self, x: torch.complex(*[Net.forward(self, x)] * 2)), "complex numbers"),
    ],
)
def test_complex_weights_and_outputs_are_refused_in_one_line(model, message):
    with pytest.raises(UserError, match=message):
        make_trainer(model=model)


def test_complex_buffer_is_whole_in_the_evaluated_and_the_exported_model():
    trainer = make_trainer(model=Rotates, test_data=blobs(12))
    result = trainer.fit(max_epochs=2)
    assert torch.equal(result.model.turns, Rotates().turns)
    inputs, targets = blobs(12)
    right = (result.model(inputs).argmax(1) == targets).float().mean().item()
    assert result.test_accuracy == pytest.approx(right)


@pytest.mark.slow
def test_relu_at_its_kink_is_no_difference() -> None:
    """On one thread, one of ResNet-32's ReLUs gets a value next to zero from these images."""
    images = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with intra_op_threads(1):
        Trainer(
            model=lambda: MODELS["resnet32"]().build((3, 32, 32), 10), train_data=(images, torch.arange(512) % 10),
            augmentation=Augmentation(crop_padding=4, flip=True), mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=2,
            num_learners=1, executor="threads", device="cpu", precision="fp32",
        )  # fmt: skip
