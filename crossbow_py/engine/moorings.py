"""Whether a module still lies where it was bound: what a forward may not do to parameters and buffers of a learner.

A learner's values live in its row of the bank, which is what is stepped, averaged, evaluated and saved. A forward that
gives a parameter other memory, say, goes on with values that nobody else sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

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
    "set it where the model is made, and train on in a second run with init_from=."
)
WRITES = (
    "the model's forward writes its parameter {}, {}; make it a buffer (register_buffer), and write into that with "
    "copy_()."
)
ON_A_COPY = "which in bf16 is a copy of the learner's weights: set precision=fp32"
FROZEN = "which is frozen, so that the average model would not follow"


class Mooring(NamedTuple):
    """Where a tensor lies, how often it was written, and whether it is trained."""

    place: int
    version: int
    trained: bool


def moorings(module: nn.Module) -> dict[str, Mooring]:
    """Return those of a module's parameters and buffers, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: Mooring(own.data_ptr(), own._version, own.requires_grad) for name, own in tensors}


def strayed(module: nn.Module, bound: Mapping[str, Mooring]) -> str | None:
    """Return a sentence on what lies elsewhere than where it was bound, or is trained no more; None: nothing is."""
    for name, buffer in module.named_buffers():
        if name not in bound or bound[name].place != buffer.data_ptr():
            return _REPLACES_BUFFER.format(name)
    for name, parameter in module.named_parameters():
        if name not in bound or bound[name].place != parameter.data_ptr():
            return _REPLACES_PARAMETER.format(name)
        if bound[name].trained is not parameter.requires_grad:
            return _TOGGLES.format(name)
    return None


def written(module: nn.Module, bound: Mapping[str, Mooring], on_a_copy: bool, averages: bool) -> str | None:
    """Return a sentence on a parameter that was written since it was bound, where that is lost; None: none was.

    Args:
        module, bound: as for `strayed`, of which nothing has strayed.
        on_a_copy: whether the module runs on a copy of the weights, in which writing is lost.
        averages: whether an average model takes part, of which frozen parameters stay as they are.
    """
    for name, parameter in module.named_parameters():
        if parameter._version != bound[name].version and (on_a_copy or (averages and not parameter.requires_grad)):
            return WRITES.format(name, ON_A_COPY if on_a_copy else FROZEN)
    return None
