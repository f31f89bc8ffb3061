"""Modules whose values lie elsewhere: parameters and buffers as views of a bank's rows.

A learner's row is what is stepped, averaged, evaluated and saved. A forward that gives a parameter other memory, say,
would go on with values that nobody else sees, so whether a module is still bound is looked at now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from crossbow_py.engine.modules.precision import full_precision_parameters

_REPLACES_BUFFER = (
    "the model replaces its buffer {} in forward, and a learner's buffers live in one place; write into it instead, "
    "with copy_()."
)
_REPLACES_PARAMETER = (
    "the model's forward gives its parameter {} other memory, and a learner's weights live in one place; make it a "
    "buffer, and write into that with copy_()."
)
_TOGGLES = (
    "the model's forward changes requires_grad of its parameter {}, and what is trained is settled when a run begins; "
    "set it where the model is made, or, to freeze or thaw later, train on in a second run with init_from=."
)
WRITES_A_COPY = (
    "the model's forward writes its parameter {}, which in bf16 is a copy of the learner's weights; set "
    "precision=fp32, or make it a buffer."
)
WRITES_FROZEN = (
    "the model's forward writes its frozen parameter {}, and the average model would not follow; make it a buffer "
    "(register_buffer), or train with num_learners=1 or averaging=independent."
)


class Binding(NamedTuple):
    """Where a tensor lies, how often it was written, and whether it is trained."""

    data_ptr: int
    version: int
    trained: bool


def bind(
    module: nn.Module, master: Mapping[str, Tensor], shadow: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Make an ordinary module work on views, in place.

    Bound with `p.data = view`: a Parameter built on a view would share its version counter with every row. Buffers of
    integers keep the values they have, in the view; the others take those of theirs.

    Args:
        module: of the architecture.
        master, shadow: views of its parameters in master and compute precision; a parameter takes what it computes in.
        buffers: views of its buffers; those that are not in it stay.
    """
    full = full_precision_parameters(module)
    for name, parameter in module.named_parameters():
        parameter.data = master[name] if name in full else shadow[name]
    for name, buffer in module.named_buffers():
        if name in buffers:
            view = buffers[name]
            buffer.data = view if view.is_floating_point() else view.copy_(buffer)


def bindings_of(module: nn.Module) -> dict[str, Binding]:
    """Return those of a module's parameters and buffers, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: Binding(own.data_ptr(), own._version, own.requires_grad) for name, own in tensors}


def find_rebound(module: nn.Module, bound: Mapping[str, Binding]) -> str | None:
    """Return a sentence on a parameter or buffer that lies elsewhere now, or whose requires_grad has changed."""
    for name, buffer in module.named_buffers():
        if name not in bound or bound[name].data_ptr != buffer.data_ptr():
            return _REPLACES_BUFFER.format(name)
    for name, parameter in module.named_parameters():
        if name not in bound or bound[name].data_ptr != parameter.data_ptr():
            return _REPLACES_PARAMETER.format(name)
        if bound[name].trained is not parameter.requires_grad:
            return _TOGGLES.format(name)
    return None


def find_written(module: nn.Module, bound: Mapping[str, Binding], on_a_copy: bool, averages: bool) -> str | None:
    """Return a sentence on a parameter that forward has written where that is lost.

    Args:
        module, bound: as for `find_rebound`, which has found nothing.
        on_a_copy: whether the module computes with a copy of the weights, in which what is written is lost.
        averages: whether learners follow an average model, in which frozen parameters stay as they are.
    """
    full = full_precision_parameters(module) if on_a_copy else set()
    for name, parameter in module.named_parameters():
        if parameter._version == bound[name].version:
            continue
        if on_a_copy and name not in full:
            return WRITES_A_COPY.format(name)
        if averages and not parameter.requires_grad:
            return WRITES_FROZEN.format(name)
    return None
