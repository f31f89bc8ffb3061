"""Models that differ in the width of their layers, on rows of the widest one's bank, padded with zeros.

A unit that is padded has zero weights on both sides. Where its activation is zero at zero, as with ReLU, tanh or GELU,
no gradient comes to it, so that SGD and AdamW leave it there: value, gradient, state and statistics stay zero. A model
of which that is not so, such as one that normalises over units or draws dropout for them, differs from itself when it
is padded; `padding_for` compares the two and refuses it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, call, in_format
from crossbow_py.engine.bank.frozen_base import frozen_values
from crossbow_py.engine.trust import compare
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.packs.trial import Row, TrialSettings, shared_dropout

SHARE = 0.5  # of the widest model's parameters: what a model has at least to take part in its packs
_GATES = {"LSTM": 4, "GRU": 3}  # blocks of hidden_size outputs, one behind the other


@dataclass(frozen=True)
class Padding:
    """Where a model's values are in those of a wider one: first in every dimension, gate by gate.

    Attributes:
        own, wide: shapes by name, of parameters and of floating-point buffers.
        blocks: into how many blocks the first dimension is divided, by name, where there are several.
    """

    own: Mapping[str, torch.Size]
    wide: Mapping[str, torch.Size]
    blocks: Mapping[str, int]

    @property
    def sentence(self) -> str:
        """What the user is told."""
        size = sum(map(torch.Size.numel, self.wide.values()))
        return f"Narrower models train in packs of those of {size:,} values, padded with zeros."

    def pad(self, name: str, value: Tensor) -> Tensor:
        """Return `value` [..., *own] as [..., *wide], with zeros around it."""
        if self.own[name] == self.wide[name]:
            return value
        padded = value.new_zeros((*value.shape[: value.ndim - len(self.own[name])], *self.wide[name]))
        within = self._within(name, padded)
        within.copy_(value.reshape(within.shape))
        return padded

    def unpad(self, name: str, value: Tensor) -> Tensor:
        """Return the model's own part of `value` [..., *wide]. Raises RuntimeError if the rest is not zero."""
        if self.own[name] == self.wide[name]:
            return value
        within = self._within(name, value)
        if int(value.count_nonzero()) != int(within.count_nonzero()):
            raise RuntimeError(f"padded units of {name} have not stayed zero, as they did when they were tried")
        return within.clone().flatten(-len(self.own[name]) - 1, -len(self.own[name]))

    def _within(self, name: str, padded: Tensor) -> Tensor:
        """Return a view of the model's own part, [..., blocks, *own of a block]."""
        own, blocks = self.own[name], self.blocks.get(name, 1)
        view: Tensor = padded.unflatten(-len(own), (blocks, -1))  # type: ignore[no-untyped-call]
        for dim, size in enumerate((own[0] // blocks, *own[1:]), -len(own)):
            view = view.narrow(dim, 0, size)
        return view

    def pad_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights and buffers as the wider model has them."""
        return {name: self.pad(name, value) if name in self.own else value for name, value in state.items()}

    def unpad_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights and buffers as the model has them."""
        return {name: self.unpad(name, value) if name in self.own else value for name, value in state.items()}

    def pad_row(self, row: Row) -> Row:
        """Return the row of the wider model."""
        return _mapped(row, self.pad_state)

    def unpad_row(self, row: Row) -> Row:
        """Return the row of the model itself."""
        return _mapped(row, self.unpad_state)


def _mapped(row: Row, function: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Row:
    state = {name: function(values) for name, values in row["state"].items()}
    parts = [part for part in ("weights", "frozen", "buffers") if part in row]
    return {**row, **{part: function(row[part]) for part in parts}, "state": state}


def family(settings: TrialSettings, model: nn.Module) -> str | None:
    """Return a text that is equal for trials whose models may differ in width alone; None if none can be padded."""
    if type(settings.optimizer) not in (SGD, AdamW):
        return None
    tensors = [(name, value.ndim, str(value.dtype), value.requires_grad) for name, value in _named(model)]
    modules = [(name, type(own).__qualname__) for name, own in model.named_modules()]
    facts = (
        tensors, modules, settings.batch_size, settings.optimizer.shared(), settings.augmentation.mixes,
        frozen_values(model), shared_dropout(model),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def padding_for(model: nn.Module, wide: nn.Module, inputs: Tree) -> Padding | None:
    """Return how a model trains on a row of a wider one's bank; None if it cannot, or has too few of its parameters.

    Both are run in float64 on `inputs`, in training and then in evaluation, with weights drawn at random, as initial
    ones may be zero: outputs, gradients and buffers must be equal, and what is padded must stay zero.

    Args:
        model, wide: of one `family`, on one device; they stay as they are.
    """
    own, others = (dict(_named(each)) for each in (model, wide))
    if any(a > b for name in own for a, b in zip(own[name].shape, others[name].shape, strict=True)):
        return None
    if any(own[name].shape != others[name].shape and not own[name].is_floating_point() for name in own):
        return None
    if sum(map(torch.numel, model.parameters())) < SHARE * sum(map(torch.numel, wide.parameters())):
        return None
    padded = [name for name, value in own.items() if value.is_floating_point()]
    own_shapes, wide_shapes = ({name: each[name].shape for name in padded} for each in (own, others))
    padding = Padding(own_shapes, wide_shapes, _blocks(model))
    try:
        with kept_generators(next(model.parameters()).device):
            return padding if _is_exact(padding, model, wide, inputs) else None
    except Exception:  # of the user's model, which need not know float64
        return None


def _is_exact(padding: Padding, model: nn.Module, wide: nn.Module, inputs: Tree) -> bool:
    inputs = in_format(inputs, torch.float64)
    own, padded = (copy.deepcopy(each).double() for each in (model, wide))
    for layer in (*own.modules(), *padded.modules()):
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.5  # so that masks which padded units take part in differ for certain
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in own.parameters():
            spread = 1 / math.sqrt(max(1, parameter.shape[-1] if parameter.ndim else 1))
            parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * spread)
        for name, value in _named(padded):
            value.copy_(padding.pad_state({name: dict(_named(own))[name].detach()})[name])
    for training in (True, False):
        found, expected = (_run(each.train(training), inputs) for each in (padded, own))
        try:
            found = padding.unpad_state(found)
        except RuntimeError:
            return False
        for name, value in expected.items():
            if found[name].shape != value.shape or not torch.allclose(found[name], value, rtol=1e-9, atol=1e-12):
                return False
    return True


def _run(module: nn.Module, inputs: Tree) -> dict[str, Tensor]:
    """Return the gradients of a function of the outputs, by parameter, then buffers and the outputs themselves."""
    torch.manual_seed(0)
    outputs = call(module, inputs)
    names, parameters = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(compare.projection(outputs), parameters, allow_unused=True, materialize_grads=True)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return {**dict(zip(names, found, strict=True)), **buffers, **compare.outputs_by_name(outputs)}


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*itertools.chain(module.named_parameters(), module.named_buffers())]


def _blocks(model: nn.Module) -> dict[str, int]:
    """Return the blocks of recurrent layers' parameters by name, a gate each."""
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            gates = _GATES.get(type(module).__name__.removesuffix("Cell"), 1)
            found |= {f"{prefix}.{name}".removeprefix("."): gates for name, _ in module.named_parameters(recurse=False)}
    return found
