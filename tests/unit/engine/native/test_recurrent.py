"""Recurrent layers in C against torch's modules in float64, learner by learner."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.engine.native.recurrent import RecurrentLayer, serves

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
LEARNERS, INPUTS = 3, 2


def test_it_compiles_where_there_is_a_compiler():
    assert serves(torch.zeros(1, 1, 2, 1), 1)
    assert not serves(torch.zeros(1, 1, 1, 1), 1)  # one step


def module(kind: str, hidden: int, *, bias: bool = True) -> nn.Module:
    options = {"nonlinearity": kind[4:]} if kind.startswith("rnn") else {}
    return KINDS[kind](INPUTS, hidden, batch_first=True, bias=bias, dtype=torch.float64, **options)


def by_module(own: nn.Module, kind: str, x: Tensor, states: list[Tensor], reverse: bool) -> list[Tensor]:
    first = tuple(state[None] for state in states)
    outputs, last = own(x.flip(1) if reverse else x, first if kind == "lstm" else first[0])
    return [outputs.flip(1) if reverse else outputs, *([last[1][0]] if kind == "lstm" else [])]


def in_c(modules: list[nn.Module], kind: str, x: Tensor, states: list[Tensor], reverse: bool) -> list[Tensor]:
    """The same of all learners at once, in float32."""
    w_ih, w_hh, *biases = (torch.stack([*own]).float() for own in zip(*(m.parameters() for m in modules), strict=True))
    gates = torch.einsum("kbti,kgi->kbtg", x.float(), w_ih)
    inner = None
    if biases:
        gates = gates + biases[0][:, None, None]
        if kind == "gru":
            inner = biases[1]
        else:
            gates = gates + biases[1][:, None, None]
    given = [state.float() for state in states]
    outputs, last = RecurrentLayer.apply(kind, reverse, gates, w_hh, inner, *given)
    return [outputs, *([last] if kind == "lstm" else [])]


# Products have tiles of 4 rows and 16 columns: batches and widths below, at and beyond them.
@pytest.mark.parametrize(("batch", "steps", "hidden"), [(1, 1, 1), (3, 5, 7), (4, 3, 16), (9, 2, 21)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layer_in_c_equals_torch_modules(kind, reverse, bias, batch, steps, hidden):
    torch.manual_seed(0)
    modules = [module(kind, hidden, bias=bias) for _ in range(LEARNERS)]
    x = torch.randn(LEARNERS, batch, steps, INPUTS, dtype=torch.float64, requires_grad=True)
    shape = LEARNERS, batch, hidden
    count = 2 if kind == "lstm" else 1
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    each = [by_module(m, kind, x[j], [s[j] for s in states], reverse) for j, m in enumerate(modules)]
    wanted = [torch.stack(own) for own in zip(*each, strict=True)]
    found = in_c(modules, kind, x, states, reverse)
    values = [x, *states, *(own for m in modules for own in m.parameters())]
    weights = [torch.randn_like(own) for own in wanted]
    gradients = [
        torch.autograd.grad(sum((own * weight.to(own)).sum() for own, weight in zip(of, weights, strict=True)), values)
        for of in (found, wanted)
    ]
    torch.testing.assert_close([own.double() for own in found], wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_recurrent_layers_far_from_zero_are_those_of_torch(kind):
    """A learner that diverges is found by its losses, which must not be finite where torch's are not."""
    given = torch.tensor([0.0, 1e-20, -1e-3, 0.6249, -0.6251, 9.0, -88.0, 1e4, -1e30, torch.inf, -torch.inf, torch.nan])
    width = {"lstm": 4, "gru": 3}.get(kind, 1)
    gates = given.view(-1, 1, 1, 1).expand(-1, 1, 1, width).contiguous()
    weights, zero = torch.zeros(len(given), width, 1), torch.zeros(len(given), 1, 1)
    found, _ = RecurrentLayer.apply(kind, False, gates, weights, None, zero, *([zero] if kind == "lstm" else []))
    own = given.double()
    i, g = own.sigmoid(), own.tanh()
    wanted = {"lstm": i * (i * g).tanh(), "gru": (1 - i) * g, "rnn_tanh": g, "rnn_relu": own.relu()}[kind]
    cancelled = 3e-8 if kind == "gru" else 1e-30  # n + z·(h − n), in float32
    torch.testing.assert_close(found.flatten().double(), wanted, rtol=1e-6, atol=cancelled, equal_nan=True)


def test_only_float32_of_moderate_width_on_a_cpu_is_run_in_c():
    gates = torch.zeros(2, 3, 4, 5)
    assert serves(gates, 128)
    assert not serves(gates, 129)
    assert not serves(gates[:, :, :1], 8)  # a cell's
    assert not serves(gates.double(), 8)
    assert not serves(gates.bfloat16(), 8)
    assert not serves(gates.to("meta"), 8)
