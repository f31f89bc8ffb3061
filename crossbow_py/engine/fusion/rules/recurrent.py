"""Rules for recurrent layers and cells: LSTM, GRU and plain RNN, with one batched product of all learners a time step.

The loop runs projections (`proj_size`), packed sequences, and dropout between layers, which torch draws inside the
operator from its own generator: no executor can repeat it, and a run's probe warns of it. `nn.Dropout` between separate
layers draws from the learners' generators.

The loop's time divided by the rule's, forward and backward, float32, 16 learners, 28 steps of 28 inputs, batches of 16
and 32, interleaved on a busy machine (ratios of the shortest times; medians scatter by a third and more):

    LSTM  2 cores  hidden 64: 1.54, 1.36   128: 1.13, 1.20   256: 0.99, 0.65     (forward alone at 128: 0.74, 1.12)
    LSTM  1 core   hidden 64: 1.26, 1.21   128: 0.81, 1.11   256: 0.62
    GRU   1 core   hidden 64: 3.8, 3.2     128: 3.0, 2.0     256: 1.16           (whole rounds, but for 256)
    RNN   1 core   hidden 64: 5.5, 2.2     128: 2.6, 2.0     (whole rounds)

On CPUs torch runs a float32 LSTM layer with oneDNN, and everything else with its own operators, step by step. So the
loop runs wide LSTM layers in float32 there. No rule has been measured on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossbow_py.engine.fusion.rules.layers import linear
from crossbow_py.engine.fusion.rules.recurrence import GRU, LSTM, Elman
from crossbow_py.engine.fusion.rules.registry import Call, NotFusedError, arguments_by_name, base_name, rule
from crossbow_py.engine.fusion.values import Fused, Layout, stack

_WIDEST_LSTM = 128  # hidden values; see the module's docstring
# The weights of inputs and of states, and their biases if there are any.
_Weights = Sequence[Fused]
# Takes inputs [B, T, I] of each learner or shared, one direction's weights, its initial states [K, B, H], and whether
# time runs backwards; returns outputs [K, B, T, H] and the last states.
_Direction = Callable[[Call, Fused, _Weights, Sequence[Tensor], bool], tuple[Tensor, list[Tensor]]]


@rule("lstm")
def lstm(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return outputs, the last h and the last c of every layer and direction."""
    named = arguments_by_name(call, args, kwargs)
    hidden = named["hx"][0].tensor
    if hidden.shape[-1] > _WIDEST_LSTM and _has_layers_of_onednn(hidden):
        raise NotFusedError
    return _layers(call, named, named["hx"])


@rule("gru", "rnn_tanh", "rnn_relu")
def of_one_state(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return outputs, and the last h of every layer and direction."""
    named = arguments_by_name(call, args, kwargs)
    return _layers(call, named, [named["hx"]])


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the new states after one step of one layer."""
    named = arguments_by_name(call, args, kwargs)
    k, has_several = call.num_learners, isinstance(named["hx"], list)
    given = named["hx"] if has_several else [named["hx"]]
    weights = [value for name in ("w_ih", "w_hh", "b_ih", "b_hh") if (value := named[name]) is not None]
    own = _in_rows(named["input"], k)
    once = Fused(own.tensor.unsqueeze(-2), own.layout)
    _, last = _direction_of(call)(call, once, weights, [stack(state, k) for state in given], False)
    found = [Fused(state, Layout.STACK) for state in last]
    return found if has_several else found[0]


def _layers(call: Call, named: Mapping[str, Any], initial: Sequence[Fused]) -> list[Fused]:
    """Return outputs of the last layer, and the last states `[K, L·D, B, H]` of all layers and directions."""
    num_directions, count = 1 + named["bidirectional"], 2 + 2 * named["has_biases"]
    _check(named, initial, named["num_layers"] * num_directions * count)
    k, direction = call.num_learners, _direction_of(call)
    given = [stack(state, k) for state in initial]
    own, last = _in_rows(named["input"], k), []
    if not named["batch_first"]:
        own = _swapped(own)
    for layer in range(named["num_layers"]):
        found = []
        for index in range(layer * num_directions, (layer + 1) * num_directions):
            weights = named["params"][index * count : (index + 1) * count]
            states = [state[:, index] for state in given]
            outputs, ends = direction(call, own, weights, states, bool(index % num_directions))
            found.append(outputs)
            last.append(ends)
        own = Fused(found[0] if num_directions == 1 else torch.cat(found, -1), Layout.STACK)
    final = [Fused(torch.stack(each, 1), Layout.STACK) for each in zip(*last, strict=True)]
    return [own if named["batch_first"] else _swapped(own), *final]


def _check(named: Mapping[str, Any], initial: Sequence[Fused], num_weights: int) -> None:
    """Raise NotFusedError for layers that the loop runs."""
    packed = "batch_sizes" in named
    if packed or len(named["params"]) != num_weights:
        raise NotFusedError  # a projection has one more weight for each direction
    if named["dropout"] and named["train"] and named["num_layers"] > 1:
        raise NotFusedError


def _has_layers_of_onednn(like: Tensor) -> bool:
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return there and like.device.type == "cpu" and like.dtype == torch.float32


def _in_rows(value: Fused, num_learners: int) -> Fused:
    """Return shared inputs unchanged, and others as `[K, ...]`."""
    return value if value.layout is Layout.SHARED else Fused(stack(value, num_learners), Layout.STACK)


def _swapped(sequences: Fused) -> Fused:
    """Return `[T, B, N]` of each learner as a view `[B, T, N]`, or the other way round."""
    return Fused(sequences.tensor.transpose(-3, -2), sequences.layout)


def _direction_of(call: Call) -> _Direction:
    kinds = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _elman, "rnn_relu": _elman}
    return kinds[base_name(call.target).removesuffix("_cell")]


def _lstm(
    call: Call, own: Fused, weights: _Weights, states: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    gates = _share_of_inputs(call, own, weights[0], _sum(weights[2:], call.num_learners))
    outputs, c = LSTM.apply(reverse, gates, stack(weights[1], call.num_learners), *states)  # type: ignore[no-untyped-call]
    return outputs, [_last(outputs, reverse), c]


def _gru(
    call: Call, own: Fused, weights: _Weights, states: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    k = call.num_learners
    bias, of_states = (weights[2], stack(weights[3], k)) if len(weights) > 2 else (None, None)
    gates = _share_of_inputs(call, own, weights[0], bias)
    outputs: Tensor = GRU.apply(reverse, gates, stack(weights[1], k), of_states, *states)  # type: ignore[no-untyped-call]
    return outputs, [_last(outputs, reverse)]


def _elman(
    call: Call, own: Fused, weights: _Weights, states: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    k, relu = call.num_learners, "relu" in base_name(call.target)
    gates = _share_of_inputs(call, own, weights[0], _sum(weights[2:], k))
    outputs: Tensor = Elman.apply(reverse, relu, gates, stack(weights[1], k), *states)  # type: ignore[no-untyped-call]
    return outputs, [_last(outputs, reverse)]


def _share_of_inputs(call: Call, own: Fused, weight: Fused, bias: Fused | None) -> Tensor:
    """Return the inputs' share of the gates, `[K, B, T, N]`, for all time steps in one product."""
    found: Fused = linear(replace(call, target=torch.ops.aten.linear.default), [own, weight, bias], {})
    return found.tensor


def _sum(biases: Sequence[Fused], num_learners: int) -> Fused | None:
    each = [stack(bias, num_learners) for bias in biases]
    return Fused(each[0] + each[1], Layout.STACK) if each else None


def _last(outputs: Tensor, reverse: bool) -> Tensor:
    return outputs[:, :, 0 if reverse else -1]
