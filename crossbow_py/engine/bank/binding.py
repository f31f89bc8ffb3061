"""Modules bound to a bank: their parameters and buffers are views of the bank's rows.

A learner's row is stepped, averaged, evaluated and saved. A forward that, say, gives a parameter other memory would
compute with values that nothing else sees, so bindings are checked from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from crossbow_py.engine.modules.precision import full_precision_parameters

_REPLACES_BUFFER = (
    "the model's forward replaces its buffer {}, and a learner's buffers must keep their memory; write into it "
    "instead, with copy_()."
)
_REPLACES_PARAMETER = (
    "the model's forward gives its parameter {} other memory, and a learner's weights must keep theirs; make it a "
    "buffer, and write into that with copy_()."
)
_TOGGLES = (
    "the model's forward changes requires_grad of its parameter {}, and what is trained is fixed when a run begins; "
    "set it where the model is made, or, to freeze or thaw later, train on in a second run with init_from=."
)
WRITES_A_COPY = (
    "the model's forward writes its parameter {}, which in bf16 is a copy of the learner's weights; set "
    "precision=fp32, or make it a buffer."
)
WRITES_FROZEN = (
    "the model's forward writes its frozen parameter {}, which all learners share; make it a buffer "
    "(register_buffer), or train with num_learners=1."
)


class Binding(NamedTuple):
    """A tensor's address, how often it was written, and whether it is trained."""

    data_ptr: int
    version: int
    trained: bool


def bind(
    module: nn.Module, master: Mapping[str, Tensor], shadow: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Replace a module's parameters and buffers by views, in place.

    Args:
        module: an ordinary module.
        master, shadow: views of its parameters in master and in compute precision; each parameter takes the one that
            it computes in.
        buffers: views of its buffers; others stay as they are. The module's integer buffers keep their values, which
            are copied to the view; floating-point ones take the view's.
    """
    # `p.data = view`, because a Parameter built on a view would share its version counter with every row.
    full = full_precision_parameters(module)
    for name, parameter in module.named_parameters():
        parameter.data = master[name] if name in full else shadow[name]
    for name, buffer in module.named_buffers():
        if name in buffers:
            view = buffers[name]
            buffer.data = view if view.is_floating_point() else view.copy_(buffer)


def bindings_of(module: nn.Module) -> dict[str, Binding]:
    """Return the bindings of a module's parameters and buffers, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: Binding(own.data_ptr(), own._version, own.requires_grad) for name, own in tensors}


def find_rebound(module: nn.Module, bound: Mapping[str, Binding]) -> str | None:
    """Return a message about a parameter or buffer that has other memory now, or another requires_grad; else None."""
    for name, buffer in module.named_buffers():
        if name not in bound or bound[name].data_ptr != buffer.data_ptr():
            return _REPLACES_BUFFER.format(name)
    for name, parameter in module.named_parameters():
        if name not in bound or bound[name].data_ptr != parameter.data_ptr():
            return _REPLACES_PARAMETER.format(name)
        if bound[name].trained is not parameter.requires_grad:
            return _TOGGLES.format(name)
    return None


def find_written_copy(module: nn.Module, bound: Mapping[str, Binding]) -> str | None:
    """Return a message about a parameter that forward wrote in a copy in compute precision, which is lost; else None.

    `find_rebound` must have found nothing.
    """
    full = full_precision_parameters(module)
    written = [name for name in _written(module, bound) if name not in full]
    return WRITES_A_COPY.format(written[0]) if written else None


def find_written_base(module: nn.Module, bound: Mapping[str, Binding]) -> str | None:
    """Return a message about a frozen parameter that forward wrote; else None."""
    written = [name for name, own in _written(module, bound).items() if not own.requires_grad]
    return WRITES_FROZEN.format(written[0]) if written else None


def _written(module: nn.Module, bound: Mapping[str, Binding]) -> dict[str, nn.Parameter]:
    return {name: own for name, own in module.named_parameters() if own._version != bound[name].version}
