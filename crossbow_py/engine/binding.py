"""Modules whose values lie elsewhere: parameters and buffers as views of a bank's rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from crossbow_py.engine.precision import full_precision_parameters


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
