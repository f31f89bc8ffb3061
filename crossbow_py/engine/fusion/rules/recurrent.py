"""Rules for recurrent layers and cells: LSTM, GRU and plain RNN, with one batched product of all learners a time step.

The loop runs projections (`proj_size`), packed sequences, and dropout between layers, which torch draws inside the
operator from its own generator: no executor can repeat it, and a run's probe warns of it. `nn.Dropout` between separate
layers draws from the learners' generators.

In float32 on a CPU with a C compiler, layers of up to 128 hidden values run in C (engine/native/recurrent.py), which
was compared with torch's operators here, forward and backward, on two cores with AVX2 (16 learners, batches of 16,
ratios of the shortest of 20 turns): GRU of 32, 64 and 128 hidden values 2.70, 2.14 and 1.89 times as fast, LSTM 1.94,
1.60 and 1.47, RNN 1.87, 1.70 and 1.52.

The loop's time divided by that of torch's operators here, forward and backward, float32, 16 learners, 28 steps of 28
inputs, batches of 16 and 32, interleaved on a busy machine (ratios of the shortest times; medians scatter by a third
and more):

    LSTM  2 cores  hidden 64: 1.54, 1.36   128: 1.13, 1.20   256: 0.99, 0.65     (forward alone at 128: 0.74, 1.12)
    LSTM  1 core   hidden 64: 1.26, 1.21   128: 0.81, 1.11   256: 0.62
    GRU   1 core   hidden 64: 3.8, 3.2     128: 3.0, 2.0     256: 1.16           (whole rounds, but for 256)
    RNN   1 core   hidden 64: 5.5, 2.2     128: 2.6, 2.0     (whole rounds)

On CPUs torch runs a float32 LSTM layer with oneDNN, and everything else with its own operators, step by step. So the
loop runs wide LSTM layers in float32 there. It runs all LSTM layers with torch 2.11, which exports their last
states with a dimension too many. No rule has been measured on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossbow_py.engine.fusion.rules.layers import all_shared, linear
from crossbow_py.engine.fusion.rules.registry import Call, NotFusedError, arguments_by_name, base_name, rule, run
from crossbow_py.engine.fusion.values import Fused, Layout, split_learners
from crossbow_py.engine.native import recurrent as native

_WIDEST_LSTM = 128  # hidden values; see the module's docstring
_aten = torch.ops.aten


@rule("lstm")
def lstm(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return outputs, the last h and the last c of every layer and direction."""
    named = arguments_by_name(call, args, kwargs)
    hidden = named["hx"][0].tensor
    if all_shared(*named["params"]):
        return _of_one_row(call, named, named["hx"])
    plain = hidden.device.type == "cpu" and hidden.dtype == torch.float32
    if plain and hidden.shape[-1] > _WIDEST_LSTM and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise NotFusedError
    return _layers(call, named, named["hx"])


@rule("gru", "rnn_tanh", "rnn_relu")
def of_one_state(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return outputs, and the last h of every layer and direction."""
    named = arguments_by_name(call, args, kwargs)
    if all_shared(*named["params"]):
        return _of_one_row(call, named, [named["hx"]])
    return _layers(call, named, [named["hx"]])


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the new states after one step of one layer."""
    named = arguments_by_name(call, args, kwargs)
    has_several = isinstance(named["hx"], list)
    given = named["hx"] if has_several else [named["hx"]]
    weights = [value for name in ("w_ih", "w_hh", "b_ih", "b_hh") if (value := named[name]) is not None]
    own = _in_rows(call, named["input"])
    once = Fused(own.tensor.unsqueeze(-2), own.layout)
    _, last = _direction(call, once, weights, [call.stack(state) for state in given], False)
    found = [Fused(state, Layout.STACK) for state in last]
    return found if has_several else found[0]


def _of_one_row(call: Call, named: dict[str, Any], initial: Sequence[Fused]) -> list[Fused]:
    """Run the operator, whose weights are shared, on the samples of all learners."""
    if "batch_sizes" in named or (named["dropout"] and named["train"] and named["num_layers"] > 1):
        raise NotFusedError
    batch = 0 if named["batch_first"] else 1

    def folded(value: Fused, dim: int) -> Tensor:
        return call.stack(value).movedim(0, dim).flatten(dim, dim + 1)

    states = [folded(state, 1) for state in initial]
    weights = [value.tensor for value in named["params"]]
    given = {"input": folded(named["input"], batch), "hx": states if len(states) > 1 else states[0], "params": weights}
    found = run(call.target, named | given)
    dims = [batch, *[1] * len(states)]
    return [
        Fused(split_learners(each, dim, call.num_learners).movedim(dim, 0), Layout.STACK)
        for each, dim in zip(found, dims, strict=True)
    ]


def _layers(call: Call, named: Mapping[str, Any], initial: Sequence[Fused]) -> list[Fused]:
    """Return outputs of the last layer, and the last states `[K, L·D, B, H]` of all layers and directions."""
    num_directions, count = 1 + named["bidirectional"], 2 + 2 * named["has_biases"]
    if "batch_sizes" in named or len(named["params"]) != named["num_layers"] * num_directions * count:
        raise NotFusedError  # a packed sequence, or a projection, which has one more weight for each direction
    if named["dropout"] and named["train"] and named["num_layers"] > 1:
        raise NotFusedError
    given = [call.stack(state) for state in initial]
    own, last = _in_rows(call, named["input"]), []
    if not named["batch_first"]:
        own = _swapped(own)
    for layer in range(named["num_layers"]):
        found = []
        for index in range(layer * num_directions, (layer + 1) * num_directions):
            weights = named["params"][index * count : (index + 1) * count]
            states = [state[:, index] for state in given]
            outputs, ends = _direction(call, own, weights, states, bool(index % num_directions))
            found.append(outputs)
            last.append(ends)
        own = Fused(found[0] if num_directions == 1 else torch.cat(found, -1), Layout.STACK)
    final = [Fused(torch.stack(each, 1), Layout.STACK) for each in zip(*last, strict=True)]
    return [own if named["batch_first"] else _swapped(own), *final]


def _in_rows(call: Call, value: Fused) -> Fused:
    """Return shared inputs unchanged, and others as `[K, ...]`."""
    return value if value.layout is Layout.SHARED else Fused(call.stack(value), Layout.STACK)


def _swapped(sequences: Fused) -> Fused:
    """Return `[T, B, N]` of each learner as a view `[B, T, N]`, or the other way round."""
    return Fused(sequences.tensor.transpose(-3, -2), sequences.layout)


def _direction(
    call: Call, own: Fused, weights: Sequence[Fused], states: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs `[K, B, T, H]` and the last states of one direction of one layer.

    Args:
        call: the operator of the layer or cell.
        own: inputs `[B, T, I]`, each learner's or shared.
        weights: those of inputs and of states, and their biases if there are any.
        states: the initial ones `[K, B, H]`.
        reverse: whether time runs backwards.
    """
    kind = base_name(call.target).removesuffix("_cell")
    of_inputs, of_states, *biases = weights
    bias = biases[0] if biases else None
    if bias is not None and kind != "gru":
        bias = Fused(call.stack(bias) + call.stack(biases[1]), Layout.STACK)
    # The inputs' share of the gates for all time steps in one product.
    gates = call.stack(linear(replace(call, target=_aten.linear.default), [own, of_inputs, bias], {}))
    given, last = call.stack(of_states), []
    if native.serves(gates, given.shape[2]):
        inner = call.stack(biases[1]) if biases and kind == "gru" else None
        outputs, *last = native.RecurrentLayer.apply(kind, reverse, gates, given, inner, *states)  # type: ignore[no-untyped-call]
        last = [each for each in last if each is not None]
    elif kind == "lstm":
        outputs, *last = LSTM.apply(reverse, gates, given, *states)  # type: ignore[no-untyped-call]
    elif kind == "gru":
        inner = call.stack(biases[1]) if biases else None
        outputs = GRU.apply(reverse, gates, given, inner, *states)  # type: ignore[no-untyped-call]
    else:
        outputs = Elman.apply(reverse, kind == "rnn_relu", gates, given, *states)  # type: ignore[no-untyped-call]
    return outputs, [outputs[:, :, 0 if reverse else -1], *last]


# Recurrent layers of all learners over all time steps, forward and backward, given the inputs' product with weights.
#
# A step is one batched product of all learners and some element-wise operators. Values for the backward pass are stored
# for all steps together: gradients of weights are one batched product over all steps, and those of an LSTM's gates are
# multiples of factors computed for all steps at once (for GRU that was no faster). For an LSTM with 64 hidden values
# and batches of 16, with factors computed in each step, 16 learners took 0.78 of the time of autograd over the same
# operators, on two CPU cores.
#
# Legend: K learners, T steps, B batch, H hidden size; gates are in torch's order.


def _slots(initial: Tensor, num_steps: int, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return states `[T + 1, K, B, H]` with the initial one, and views of those before and after each step, by time."""
    every = initial.new_empty(num_steps + 1, *initial.shape)
    early, late = every[:-1], every[1:]
    before, after = (late, early) if reverse else (early, late)
    before[-1 if reverse else 0].copy_(initial)
    return every, before, after


def _order(num_steps: int, reverse: bool) -> range:
    return range(num_steps - 1, -1, -1) if reverse else range(num_steps)


def _by_rows(steps: Tensor) -> Tensor:
    """Return `[T, K, B, N]` as contiguous `[K, B, T, N]`, for batched products over all steps."""
    return steps.permute(1, 2, 0, 3).contiguous()


def _by_steps(rows: Tensor) -> Tensor:
    """Return `[K, B, T, N]` as a view `[T, K, B, N]`."""
    return rows.permute(2, 0, 1, 3)


def _of_weights(gradients: Tensor, before: Tensor) -> Tensor:
    """Return the gradient of weights `[K, N, H]` from those of products `[K, B, T, N]` and states `[T, K, B, H]`."""
    return torch.bmm(gradients.flatten(1, 2).transpose(1, 2), _by_rows(before).flatten(1, 2))


class LSTM(torch.autograd.Function):
    """One direction of one LSTM layer.

        i, f, o = σ(…), g = tanh(…);   c ← f·c + i·g;   h ← o·tanh(c)

    The gates include the bias of the states' product.
    """

    @staticmethod
    def forward(
        ctx: Any, reverse: bool, gates: Tensor, weights: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs `[K, B, T, H]` and the last c.

        Args:
            ctx: of autograd.
            reverse: whether time runs backwards.
            gates: the inputs' products `[K, B, T, 4H]`.
            weights: those of the states, `[K, 4H, H]`.
            hidden, cell: the initial states `[K, B, H]`.
        """
        ctx.set_materialize_grads(False)
        own, size, turned = _by_steps(gates), weights.shape[2], weights.transpose(1, 2)
        found = gates.new_empty(own.shape)
        i, f, g, o = (part.unbind() for part in torch.split(found, size, -1))
        both = found[..., : 2 * size].unbind()
        states, h, h_next = _slots(hidden, len(own), reverse)
        cells, c, c_next = _slots(cell, len(own), reverse)
        bounded = gates.new_empty(c.shape)
        for t in _order(len(own), reverse):
            torch.baddbmm(own[t], h[t], turned, out=found[t])
            both[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c[t], out=c_next[t]).addcmul_(i[t], g[t])
            torch.tanh(c_next[t], out=bounded[t])
            torch.mul(o[t], bounded[t], out=h_next[t])
        ctx.reverse = reverse
        ctx.save_for_backward(weights, found, bounded, states, cells)
        return h_next.permute(1, 2, 0, 3), c_next[0 if reverse else -1].clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs, dc = given
        weights, found, bounded, states, cells = ctx.saved_tensors
        h, c = (each[1:] if ctx.reverse else each[:-1] for each in (states, cells))
        i, f, g, o = torch.split(found, weights.shape[2], -1)
        gates = torch.empty_like(found)  # the factors of gradients of c, and for o of h; then the products
        by_gate = gates.unflatten(-1, (4, -1))  # type: ignore[no-untyped-call]
        _aten.sigmoid_backward.grad_input(g, i, grad_input=by_gate[..., 0, :])
        _aten.sigmoid_backward.grad_input(c, f, grad_input=by_gate[..., 1, :])
        _aten.tanh_backward.grad_input(i, g, grad_input=by_gate[..., 2, :])
        _aten.sigmoid_backward.grad_input(bounded, o, grad_input=by_gate[..., 3, :])
        inward = _aten.tanh_backward(o, bounded)  # from h to c
        dh, dc = torch.zeros_like(bounded[0]), torch.zeros_like(bounded[0]) if dc is None else dc
        for t in _order(len(found), not ctx.reverse):
            if outputs is not None:
                dh = dh + outputs[:, :, t]
            dc = torch.addcmul(dc, dh, inward[t])
            by_gate[t, ..., :3, :].mul_(dc.unsqueeze(-2))
            by_gate[t, ..., 3, :].mul_(dh)
            dc = dc * f[t]
            dh = torch.bmm(gates[t], weights)
        rows = _by_rows(gates)
        return None, rows, _of_weights(rows, h) if ctx.needs_input_grad[2] else None, dh, dc


class GRU(torch.autograd.Function):
    """One direction of one GRU layer.

    r, z = σ(x + W·h + b),   n = tanh(x + r·(W·h + b));   h ← n + z·(h − n)
    """

    @staticmethod
    def forward(ctx: Any, reverse: bool, gates: Tensor, weights: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
        """Return outputs `[K, B, T, H]`.

        Args:
            ctx: of autograd.
            reverse: whether time runs backwards.
            gates: the inputs' products `[K, B, T, 3H]`.
            weights, bias: those of the states, `[K, 3H, H]` and `[K, 3H]`.
            hidden: the initial state `[K, B, H]`.
        """
        own, size, turned = _by_steps(gates), weights.shape[2], weights.transpose(1, 2)
        found = gates.new_empty(own.shape)
        both, n = (part.unbind() for part in torch.split(found, [2 * size, size], -1))
        r, z = (part.unbind() for part in torch.split(found[..., : 2 * size], size, -1))
        states, h, h_next = _slots(hidden, len(own), reverse)
        inner = gates.new_empty(h.shape)  # W·h + b of n
        product = gates.new_empty(found[0].shape)
        for t in _order(len(own), reverse):
            if bias is None:
                torch.bmm(h[t], turned, out=product)
            else:
                torch.baddbmm(bias.unsqueeze(1), h[t], turned, out=product)
            torch.add(own[t, ..., : 2 * size], product[..., : 2 * size], out=both[t]).sigmoid_()
            inner[t].copy_(product[..., 2 * size :])
            torch.addcmul(own[t, ..., 2 * size :], r[t], inner[t], out=n[t]).tanh_()
            torch.lerp(n[t], h[t], z[t], out=h_next[t])
        ctx.reverse, ctx.has_bias = reverse, bias is not None
        ctx.save_for_backward(weights, found, inner, states)
        return h_next.permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (outputs,), (weights, found, inner, states) = given, ctx.saved_tensors
        h, size = states[1:] if ctx.reverse else states[:-1], weights.shape[2]
        r, z, n = (part.unbind() for part in torch.split(found, size, -1))
        # Gradients of W·h + b; those of the gates differ only for n.
        products, last = torch.empty_like(found), torch.empty_like(inner)
        dr, dz, dn = (part.unbind() for part in torch.split(products, size, -1))
        dh = torch.zeros_like(last[0])
        for t in _order(len(found), not ctx.reverse):
            dh = dh + outputs[:, :, t]
            _aten.sigmoid_backward.grad_input(dh * (h[t] - n[t]), z[t], grad_input=dz[t])
            kept = dh * z[t]
            _aten.tanh_backward.grad_input(dh - kept, n[t], grad_input=last[t])
            _aten.sigmoid_backward.grad_input(last[t] * inner[t], r[t], grad_input=dr[t])
            torch.mul(last[t], r[t], out=dn[t])
            dh = torch.baddbmm(kept, products[t], weights)
        rows = _by_rows(products)
        gates = torch.cat([rows[..., : 2 * size], last.permute(1, 2, 0, 3)], -1)
        return (
            None,
            gates,
            _of_weights(rows, h) if ctx.needs_input_grad[2] else None,
            rows.sum((1, 2)) if ctx.has_bias else None,
            dh,
        )


class Elman(torch.autograd.Function):
    """One direction of one plain RNN layer: h ← tanh(…), or relu(…). The gates include all biases."""

    @staticmethod
    def forward(ctx: Any, reverse: bool, relu: bool, gates: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
        """Return outputs `[K, B, T, H]` from gates `[K, B, T, H]`, weights `[K, H, H]` and the state `[K, B, H]`."""
        own, turned = _by_steps(gates), weights.transpose(1, 2)
        states, h, h_next = _slots(hidden, len(own), reverse)
        for t in _order(len(own), reverse):
            found = torch.baddbmm(own[t], h[t], turned, out=h_next[t])
            found.relu_() if relu else found.tanh_()
        ctx.reverse, ctx.relu = reverse, relu
        ctx.save_for_backward(weights, states)
        return h_next.permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (outputs,), (weights, states) = given, ctx.saved_tensors
        before, after = (states[1:], states[:-1]) if ctx.reverse else (states[:-1], states[1:])
        gates, dh = torch.empty_like(after), torch.zeros_like(after[0])
        for t in _order(len(after), not ctx.reverse):
            dh = dh + outputs[:, :, t]
            if ctx.relu:
                _aten.threshold_backward.grad_input(dh, after[t], 0, grad_input=gates[t])
            else:
                _aten.tanh_backward.grad_input(dh, after[t], grad_input=gates[t])
            dh = torch.bmm(gates[t], weights)
        rows = _by_rows(gates)
        return None, None, rows, _of_weights(rows, before) if ctx.needs_input_grad[3] else None, dh
