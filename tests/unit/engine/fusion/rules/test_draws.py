"""Random numbers that a forward draws anywhere: from the learner's own generator, the same in every executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from crossbow_py.engine.device.host import intra_op_threads
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.dropout import OwnDraws
from tests.support import assert_learners_equal, features, make_tasks, plan, run_rounds

HIDDEN = torch.ones(25, 25, dtype=torch.bool).tril()
HIDDEN[3] = False  # a place that sees nothing


class Drawing(nn.Module):
    """A convolution, something random on its values, a linear layer."""

    def __init__(self, draw: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.dropout = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3), nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.draw = draw

    def forward(self, images):
        values = self.draw(self.conv(images), self)
        return self.head(self.dropout(values.mean((2, 3))))


def drop_path(x, model):
    """As timm has it."""
    return x * x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.7).div_(0.7)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def images(tokens):
    return tokens.transpose(1, 2).unflatten(2, (5, 5))


def heads(x):
    return tokens(x).unflatten(2, (2, 4)).transpose(1, 2)


def scaled(x, **options):
    mixed = functional.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options)
    return images(mixed.transpose(1, 2).flatten(2))


DRAWS: dict[str, Callable[[Tensor, Drawing], Tensor]] = {
    "drop path": drop_path,
    "drop path by rand": lambda x, m: x * (0.7 + torch.rand((len(x), 1, 1, 1), dtype=x.dtype)).floor_(),
    "dropout by functions": lambda x, m: functional.dropout(functional.dropout2d(x, 0.3), 0.2),
    "alpha dropout": lambda x, m: functional.alpha_dropout(x, 0.3, training=True),
    "slopes of rrelu": lambda x, m: functional.rrelu(x, training=True),
    "noise in channels-last": lambda x, m: x + torch.randn_like(x.contiguous(memory_format=torch.channels_last)) / 9,
    "noise in place": lambda x, m: x * torch.empty_like(x).uniform_(0.5, 1.5),
    "gumbel softmax": lambda x, m: x * functional.gumbel_softmax(x, dim=1),
    "permutation": lambda x, m: x + x[torch.randperm(len(x))],
    "attention": lambda x, m: images(m.attention(*[tokens(x)] * 3, need_weights=False)[0]),
    "causal attention": lambda x, m: scaled(x, dropout_p=0.3, is_causal=True, scale=0.4),
    "attention with a mask": lambda x, m: scaled(x, dropout_p=0.3, attn_mask=HIDDEN),
    "attention with a bias": lambda x, m: scaled(x, dropout_p=0.3, attn_mask=HIDDEN.to(x.dtype)),
    "lstm": lambda x, m: images(m.lstm(tokens(x))[0]),
}


def after_rounds(name, executor, seed=0):
    order = "rows" if executor in ("serial", "threads") else "blocks"
    tasks = make_tasks(lambda: Drawing(DRAWS[name]), data=features(32, (3, 5, 5)), order=order, seed=seed)
    with intra_op_threads(2 if executor == "fused_threads" else 1):  # two groups of it
        run_rounds(tasks, executor, 3, 0.3)
    return tasks.bank


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_in_forward_are_the_same_in_every_executor(name):
    serial, *others = (after_rounds(name, executor) for executor in ("serial", "threads", "fused", "fused_threads"))
    for bank in others:
        assert_learners_equal(bank, serial)


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_numbers_drawn_in_forward_follow_from_the_seed_alone(executor):
    first, second, other = (after_rounds("drop path", executor, seed) for seed in (1, 1, 2))
    assert torch.equal(first.weights.storage, second.weights.storage)
    assert not torch.equal(first.weights.storage, other.weights.storage)


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_learners_on_one_batch_draw_numbers_of_their_own(executor):
    def noise(x, model):
        return x + torch.rand(1, dtype=x.dtype)

    tasks = make_tasks(lambda: Drawing(noise), data=features(4, (3, 5, 5)), order="blocks")
    runner = EXECUTORS[executor](tasks)
    runner.submit(dataclasses.replace(plan(tasks, 0), starts=(0, 0)))
    (outcome,) = runner.drain()
    runner.close()
    assert outcome.losses[0] != outcome.losses[1]


def test_memory_order_changes_no_number_that_is_drawn():
    shapes = torch.empty(2, 3, 4, 4), torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    drawn = []
    for like in shapes:
        with OwnDraws(torch.Generator().manual_seed(5)) as draws:
            drawn.append((torch.rand_like(like), like.normal_(), torch.bernoulli(torch.full_like(like, 0.5))))
        assert draws.has_drawn
    for plain, other in zip(*drawn, strict=True):
        assert torch.equal(plain, other)


def test_generator_of_the_models_own_is_left_to_it():
    own = torch.Generator().manual_seed(3)
    with OwnDraws(torch.Generator()) as draws:
        drawn = torch.rand(4, generator=own)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert not draws.has_drawn
