"""Recurrent layers of several learners in C, forward and backward: see recurrent.c.

All time steps of a learner are one call, without a wait between steps, and learners run side by side. It is for float32
on CPUs; the rules of recurrent layers (engine/fusion/rules/recurrent.py) do the same by torch's operators.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from crossbow_py.engine.native import library
from crossbow_py.engine.native.library import Code, loaded, num_threads, padded, require_called

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # in the order of recurrent.c
_WIDEST = 128  # hidden values; wider ones gain less, see the rules
_POINTERS = (
    "inputs", "weights", "bias", "states", "cells", "gates", "inner", "d_outputs", "d_inputs", "d_products", "d_state",
    "d_cell", "scratch",
)  # fmt: skip


class _Layer(Structure):
    """The struct `Layer` in recurrent.c."""

    _fields_ = [
        *((name, c_int64) for name in ("kind", "reverse", "batch", "steps", "hidden", "width")),
        *((name, c_void_p) for name in _POINTERS),
        ("scratch_size", c_int64),
    ]


_ARGUMENTS = (POINTER(_Layer), c_int64, c_int64)
_CODE = Code(
    "recurrent",
    {"crossbow_recurrent_forward": _ARGUMENTS, "crossbow_recurrent_backward": _ARGUMENTS},
    flags=("-ffp-contract=fast", "-fno-trapping-math"),
    headers=("small.h",),
)


def serves(gates: Tensor, hidden: int) -> bool:
    """Return whether a layer with these products of inputs, of several time steps, is run by C code here."""
    return hidden <= _WIDEST and gates.shape[-2] > 1 and library.serves(_CODE, gates)


class RecurrentLayer(torch.autograd.Function):
    """One direction of one layer: the same as the classes in engine/fusion/rules/recurrent.py.

    K learners, T steps, B batch, H hidden size, G the width of the gates.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, reverse: bool, inputs: Tensor, weights: Tensor, bias: Tensor | None, hidden: Tensor,
        cell: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return outputs `[K, B, T, H]`, and an LSTM's last c.

        Args:
            ctx: of autograd.
            kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
            reverse: whether time runs backwards.
            inputs: their products with weights, `[K, B, T, G]`, with all biases but GRU's own.
            weights, bias: those of the states, `[K, G, H]` and, of GRU, `[K, G]`.
            hidden, cell: the initial states, `[K, B, H]`.
        """
        ctx.set_materialize_grads(False)
        learners, batch, steps, width = inputs.shape
        size, given = weights.shape[2], [each.contiguous() for each in (inputs, weights)]
        shape = learners, steps + 1, batch, size
        begin, end = (-1, 0) if reverse else (0, -1)
        states, cells = inputs.new_empty(shape), None if cell is None else inputs.new_empty(shape)
        states[:, begin].copy_(hidden)
        if cells is not None and cell is not None:
            cells[:, begin].copy_(cell)
        gates = inputs.new_empty(learners, steps, batch, width if kind in ("lstm", "gru") else 0)
        inner = inputs.new_empty(learners, steps, batch, size if kind in ("lstm", "gru") else 0)
        bias = None if bias is None else bias.contiguous()
        ctx.form = _KINDS.index(kind), reverse, batch, steps, size, width
        _run("forward", ctx.form, inputs=given[0], weights=given[1], bias=bias, states=states, cells=cells,
             gates=gates, inner=inner)  # fmt: skip
        ctx.save_for_backward(given[1], bias, states, cells, gates, inner)
        outputs = states[:, :-1] if reverse else states[:, 1:]
        return outputs.transpose(1, 2), None if cells is None else cells[:, end].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_outputs, d_cell), (weights, bias, states, cells, gates, inner) = given, ctx.saved_tensors
        _, reverse, batch, steps, size, width = ctx.form
        learners = len(weights)

        def dense(gradient: Tensor | None, *shape: int) -> Tensor:
            return states.new_zeros(shape) if gradient is None else gradient.contiguous()

        d_cell = dense(d_cell, learners, batch, size).clone()
        d_inputs, d_state = states.new_empty(learners, batch, steps, width), torch.empty_like(d_cell)
        d_products = states.new_empty(learners, steps, batch, width)
        _run("backward", ctx.form, weights=weights, bias=bias, states=states, cells=cells, gates=gates, inner=inner,
             d_outputs=dense(d_outputs, learners, batch, steps, size), d_inputs=d_inputs, d_products=d_products,
             d_state=d_state, d_cell=d_cell)  # fmt: skip
        before = (states[:, 1:] if reverse else states[:, :-1]).flatten(1, 2)
        products = d_products.flatten(1, 2)
        d_weights = torch.bmm(products.transpose(1, 2), before) if ctx.needs_input_grad[3] else None
        d_bias = None if bias is None else products.sum(1)
        return None, None, d_inputs, d_weights, d_bias, d_state, None if cells is None else d_cell


def _run(direction: str, form: tuple[Any, ...], **tensors: Tensor | None) -> None:
    require_called()
    code, (_, _, batch, _, size, width) = loaded(_CODE), form
    assert code is not None, "callers ask `serves`"
    learners = len(tensors["weights"])  # type: ignore[arg-type]
    inner, columns = (size, width) if direction == "forward" else (width, size)
    scratch_size = (inner + batch) * padded(columns)
    states = tensors["states"]
    assert states is not None, "both directions have them"
    scratch = states.new_empty(learners, scratch_size)
    unused = dict.fromkeys(_POINTERS, states) | {"bias": None}  # of another kind, or direction
    held = unused | {name: own for name, own in tensors.items() if own is not None} | {"scratch": scratch}
    pointers = {name: None if own is None else own.data_ptr() for name, own in held.items()}
    layer = _Layer(*form, **pointers, scratch_size=scratch_size)
    getattr(code, f"crossbow_recurrent_{direction}")(byref(layer), learners, num_threads(learners))
