"""Values of all learners in one tensor, in one of three layouts, and the ways between them.

    SHARED     `[*shape]`, the same for every learner: inputs of an ensemble, constants
    STACK      `[K, *shape]`
    CHANNELS   `[B, K·C, ...]` for values `[B, C, ...]`: what a grouped operator takes; images channels-last in memory

CHANNELS to STACK is a view. The other way is a view for what was CHANNELS before, else one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Layout(Enum):
    """How the learners lie in a tensor."""

    SHARED = 0
    STACK = 1
    CHANNELS = 2


@dataclass(slots=True)
class Fused:
    """A tensor of all learners."""

    tensor: Tensor
    layout: Layout


@dataclass(slots=True)
class PerLearner:
    """Tensors that stay apart: integer buffers, which the learners' own modules hold."""

    tensors: list[Tensor]


def stack(value: Fused, num_learners: int) -> Tensor:
    """The value as `[K, *shape]`, a view; of a SHARED one all rows are the same memory."""
    tensor = value.tensor
    if value.layout is Layout.STACK:
        return tensor
    if value.layout is Layout.SHARED:
        return tensor.unsqueeze(0).expand(num_learners, *tensor.shape)
    return apart(tensor, 1, num_learners).transpose(0, 1)


def rank_of(value: Fused) -> int:
    """Dimensions of one learner's value."""
    return value.tensor.ndim - (value.layout is Layout.STACK)


def apart(tensor: Tensor, dim: int, num_learners: int) -> Tensor:
    """Dimension K·n taken apart into K and n; a view."""
    view: Tensor = tensor.unflatten(dim, (num_learners, -1))  # type: ignore[no-untyped-call]
    return view


def channels(value: Fused, num_learners: int) -> Tensor:
    """The value `[B, C, ...]` as `[B, K·C, ...]`."""
    if value.layout is Layout.CHANNELS:
        return value.tensor
    stacked = stack(value, num_learners)
    if stacked.ndim == 5:  # images: channels-last
        batch, height, width = stacked.shape[1], stacked.shape[3], stacked.shape[4]
        rows = stacked.permute(1, 3, 4, 0, 2).reshape(batch, height, width, -1)
        return rows.contiguous().permute(0, 3, 1, 2)  # for one channel reshape gives a view in the old order
    return stacked.transpose(0, 1).flatten(1, 2)


def channels_last(images: Tensor) -> Tensor:
    """The images `[B, C, H, W]` with their channels side by side in memory: a copy where they are not."""
    return images.contiguous(memory_format=torch.channels_last)


def with_rank(stacked: Tensor, rank: int) -> Tensor:
    """`[K, *shape]` with ones after K, so that values of different ranks broadcast as single ones do."""
    missing = rank + 1 - stacked.ndim
    return stacked[(slice(None), *(None,) * missing)] if missing > 0 else stacked


def of_learner(argument: Any, learner: int, num_learners: int) -> Any:
    """What one learner's operator would be given."""
    return map_values(argument, lambda value: _of_learner(value, learner, num_learners))


def _of_learner(value: Fused | PerLearner, learner: int, num_learners: int) -> Tensor:
    if isinstance(value, PerLearner):
        return value.tensors[learner]
    return value.tensor if value.layout is Layout.SHARED else stack(value, num_learners)[learner]


def map_values(argument: Any, function: Callable[[Any], Any]) -> Any:
    """An operator's argument with `function` applied to the values in it, which may lie in lists."""
    if isinstance(argument, Fused | PerLearner):
        return function(argument)
    if isinstance(argument, list | tuple):
        return [map_values(entry, function) for entry in argument]
    return argument


def values_in(arguments: Sequence[Any]) -> list[Fused | PerLearner]:
    """All values among an operator's arguments, in order."""
    found: list[Fused | PerLearner] = []
    for argument in arguments:
        if isinstance(argument, Fused | PerLearner):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(values_in(argument))
    return found


def wrap(result: Any, layout: Layout) -> Any:
    """An operator's result, which may be a tuple, as values of a layout."""
    if isinstance(result, Tensor):
        return Fused(result, layout)
    if isinstance(result, list | tuple):
        return [wrap(entry, layout) for entry in result]
    return result


def stacked_results(results: Sequence[Any]) -> Any:
    """The results of one operator for each learner as one value (or a list of values, or what they have in common)."""
    first = results[0]
    if isinstance(first, Tensor):
        # Of one learner as it lies: the next operator is then given what it would be in eager mode.
        return Fused(first.unsqueeze(0) if len(results) == 1 else torch.stack(list(results)), Layout.STACK)
    if isinstance(first, list | tuple):
        return [stacked_results(entries) for entries in zip(*results, strict=True)]
    return first
