"""Dropout by counter: who gets which mask, how often a value is kept and how it is scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.modules.dropout import (
    CounterDropout,
    MaskTape,
    counter_seed,
    differ_in_rate_alone,
    dropout_rates,
    has_one_rate,
    replace_dropout,
    take_masks,
)
from crossbow_py.engine.modules.precision import FP32
from tests.support import features, make_tasks, run_rounds


class Noted(nn.Module):
    """Keeps what passes through it, so that a test sees a learner's mask."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.detach().clone())
        return inputs


def model_with_noted_mask():
    return nn.Sequential(nn.Dropout(0.5), Noted(), nn.Linear(64, 3))


def masks(executor, rounds=3, num_learners=2, seed=0):
    """Whether each input value was kept: [learner][round] of bool [B, 64]."""
    data = (torch.ones(64, 64), features(64)[1])
    tasks = make_tasks(model_with_noted_mask, num_learners=num_learners, data=data, precision=FP32, seed=seed)
    run_rounds(tasks, executor, rounds)
    return [[seen != 0 for seen in tasks.bank.module(learner)[1].seen] for learner in range(num_learners)]


def test_masks_of_a_learner_do_not_depend_on_how_many_learners_there_are():
    assert torch.equal(masks("serial", num_learners=1)[0][2], masks("serial", num_learners=3)[0][2])


def test_masks_differ_between_learners_rounds_and_seeds():
    first, second = masks("serial")
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], masks("serial", seed=1)[0][0])


def test_counter_seed_is_63_bits_and_the_same_on_every_platform():
    # blake2b of "7/dropout/3/1", first 8 bytes, little endian, halved: worked out with coreutils' b2sum -l 64.
    assert counter_seed(7, "dropout", 3, 1) == 0x6A2509FA30902B57
    assert len({counter_seed(0, "dropout", n, j) for n in range(50) for j in range(8)}) == 400


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_the_share_of_values_and_scales_them_to_the_same_mean(p):
    dropout = CounterDropout(p, whole_channels=False, generator=torch.Generator().manual_seed(0)).train()
    out = dropout(torch.full((200, 500), 3.0))
    kept = out != 0
    # Six standard deviations of a binomial share over 10^5 draws.
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=6 * (p * (1 - p) / 1e5) ** 0.5)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3.0 / (1 - p)))


@pytest.mark.parametrize(("kind", "shape"), [(nn.Dropout1d, (8, 32, 5)), (nn.Dropout2d, (8, 32, 5, 5))])
def test_dropout_of_channels_drops_and_keeps_them_whole(kind, shape):
    model = nn.Sequential(kind(0.5))
    assert replace_dropout(model, torch.Generator().manual_seed(0))
    kept = (model.train()(torch.ones(shape)) != 0).flatten(2)
    assert torch.equal(kept.any(2), kept.all(2))
    assert 0.3 < kept.float().mean() < 0.7


def test_dropout_in_evaluation_is_the_identity_and_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before, inputs = generator.get_state(), torch.randn(4, 5)
    assert CounterDropout(0.5, False, generator).eval()(inputs) is inputs
    assert CounterDropout(0.0, False, generator).train()(inputs) is inputs
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_everything_gives_zeros_and_zero_gradients(dtype):
    inputs = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    out = CounterDropout(1.0, False, torch.Generator()).train()(inputs)
    out.sum().backward()
    assert out.abs().sum() == 0
    assert inputs.grad.abs().sum() == 0


def test_replace_dropout_reaches_nested_modules_and_leaves_others():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Dropout3d(0.2)), "b": nn.Dropout(0.1)})
    generator = torch.Generator()
    assert replace_dropout(model, generator)
    nested = model["a"][1]
    assert (nested.p, nested.whole_channels) == (0.2, True)
    assert nested.generator is model["b"].generator is generator
    assert not replace_dropout(nn.Sequential(nn.Linear(2, 2)), generator)


def test_tape_drawn_ahead_gives_a_pass_the_masks_it_would_have_drawn_in_the_same_tensors():
    generator, tape, like = torch.Generator().manual_seed(0), MaskTape(), torch.empty(1)

    def passed(masks_ahead):
        with tape.over(masks_ahead):
            return [take_masks((3, 4), [0.5], [generator], like), take_masks((5,), [0.2], [generator], like)]

    kept = passed(masks_ahead=False)
    generator.manual_seed(7)
    expected = [take_masks((3, 4), [0.5], [generator], like), take_masks((5,), [0.2], [generator], like)]
    generator.manual_seed(7)
    tape.draw()
    found = passed(masks_ahead=True)
    assert all(one is other for one, other in zip(found, kept, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_pass_that_draws_its_own_leaves_the_masks_that_graphs_read():
    generator, tape, like = torch.Generator(), MaskTape(), torch.empty(1)

    def passed(masks_ahead):
        with tape.over(masks_ahead):
            return take_masks((8,), [0.5], [generator], like)

    read = passed(masks_ahead=False)
    tape.draw()
    before = read.clone()
    generator.manual_seed(3)
    own = passed(masks_ahead=False)
    assert own is not read and torch.equal(own, take_masks((8,), [0.5], [generator.manual_seed(3)], like))
    assert torch.equal(read, before) and passed(masks_ahead=True) is read


def test_tape_refuses_a_pass_unlike_the_one_recorded():
    generator, tape, like = torch.Generator(), MaskTape(), torch.empty(1)
    with tape.over(masks_ahead=False):
        take_masks((3,), [0.5], [generator], like)
    for shape, p in (((4,), 0.5), ((3,), 0.4)):
        with pytest.raises(RuntimeError, match="other shapes"), tape.over(masks_ahead=True):
            take_masks(shape, [p], [generator], like)
    with pytest.raises(RuntimeError, match="took 0 masks, and 1 in the rounds before"), tape.over(masks_ahead=True):
        pass
    first, second = (take_masks((3,), [0.5], [generator], like) for _ in range(2))
    assert first is not second  # no tape is left in place


class Functional(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop, self.rate = nn.Dropout(rate), rate


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda rate: nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate), nn.Dropout1d(rate)), True),
        (lambda rate: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), False),  # it does not follow
        (lambda rate: nn.Sequential(nn.Dropout(rate), nn.Dropout(0.5)), False),  # nor all of them
        (lambda rate: nn.Sequential(nn.Linear(3, 3)), False),
        (lambda rate: nn.Sequential(nn.Dropout(rate), nn.LeakyReLU(rate)), False),
        (lambda rate: nn.Sequential(nn.Dropout(rate), nn.Linear(3, int(10 * rate))), False),
        (lambda rate: nn.Sequential(nn.Dropout(rate), *[nn.ReLU()] * int(10 * rate)), False),
        (lambda rate: nn.Sequential(nn.Dropout(rate), nn.ReLU() if rate > 0.3 else nn.Tanh()), False),
        (Functional, False),
    ],
)
def test_models_that_differ_in_the_rate_of_dropout_alone_are_known(make, alone):
    rates = {own for own in dropout_rates(make(0.2)) if own != 0.2} or not dropout_rates(make(0.2))
    assert (differ_in_rate_alone(make(0.4), make(0.2)) and not rates) is alone


class Reads(nn.Module):
    """Reads the rate of a layer in its forward, where a graph has it as a number."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.drop, self.uses = nn.Dropout(0.4), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.drop.p, self.training) if self.uses else self.drop(x)


class Own(nn.Dropout):
    """It is not replaced by a layer that draws from a learner's generator."""


@pytest.mark.parametrize(
    ("module", "alone"),
    [
        (Reads(uses=False), True),
        (Reads(uses=True), False),
        (nn.Sequential(Own(0.4)), False),
        (nn.Sequential(nn.Dropout(0.4), Own(0.4)), False),
        (nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.3)), False),
        (nn.Sequential(nn.Dropout(0.0)), False),
        (nn.Sequential(nn.ReLU()), False),
        (nn.Sequential(nn.Dropout(0.4), nn.Dropout1d(0.4)), True),
    ],
)
def test_models_whose_dropout_is_by_layers_of_one_rate_are_known(module, alone):
    assert has_one_rate(module, lambda it: it(torch.ones(2, 3))) is alone
