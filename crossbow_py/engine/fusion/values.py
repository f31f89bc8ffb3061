"""Values of all learners in one tensor, in one of three layouts, and conversions between them.

    SHARED     `[*shape]`, the same for every learner, as inputs of an ensemble and constants are
    STACK      `[K, *shape]`
    CHANNELS   `[B, K·C, ...]` for values `[B, C, ...]`, as grouped operators take; images are channels-last in memory

CHANNELS to STACK is a view. The other way is a view if the value was CHANNELS before, else one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Layout(Enum):
    """The arrangement of learners in a tensor."""

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
    """A tensor for each learner: integer buffers, which the learners' own modules hold."""

    tensors: list[Tensor]


@dataclass
class Copies:
    """A value with a tensor for each user, all with the same memory: see `UnitRules`."""

    values: list[Fused]

    def take(self) -> Fused:
        """Return a tensor that no user has taken yet."""
        return self.values.pop()


def stack(value: Fused, num_learners: int) -> Tensor:
    """Return the value as a view `[K, *shape]`; all rows of a SHARED value are the same memory."""
    tensor = value.tensor
    if value.layout is Layout.STACK:
        return tensor
    if value.layout is Layout.SHARED:
        return tensor.unsqueeze(0).expand(num_learners, *tensor.shape)
    return split_learners(tensor, 1, num_learners).transpose(0, 1)


def folds(value: Fused) -> bool:
    """Return whether a value is `[K, B, ...]` in the memory of `[K·B, ...]`, as after layers with shared weights."""
    own = value.tensor
    return value.layout is Layout.STACK and own.ndim > 1 and own.stride(0) == own.shape[1] * own.stride(1)


def rank_of(value: Fused) -> int:
    """Return the number of dimensions of one learner's value."""
    return value.tensor.ndim - (value.layout is Layout.STACK)


def split_learners(tensor: Tensor, dim: int, num_learners: int) -> Tensor:
    """Return a view with dimension K·n split into K and n."""
    view: Tensor = tensor.unflatten(dim, (num_learners, -1))  # type: ignore[no-untyped-call]
    return view


def channels(value: Fused, num_learners: int) -> Tensor:
    """Return the value `[B, C, ...]` as `[B, K·C, ...]`."""
    if value.layout is Layout.CHANNELS:
        return value.tensor
    stacked = stack(value, num_learners)
    if stacked.ndim == 5:  # images: channels-last
        batch, height, width = stacked.shape[1], stacked.shape[3], stacked.shape[4]
        rows = stacked.permute(1, 3, 4, 0, 2).reshape(batch, height, width, -1)
        return rows.contiguous().permute(0, 3, 1, 2)  # contiguous: for one channel reshape gives a view
    return stacked.transpose(0, 1).flatten(1, 2)


def channels_last(images: Tensor) -> Tensor:
    """Return images `[B, C, H, W]` channels-last in memory, which copies if they are not."""
    return images.contiguous(memory_format=torch.channels_last)


def matrix_of(images: Tensor) -> Tensor:
    """Return `[B, N, H, W]` as `[B·H·W, N]`: a view of channels-last images, else one copy."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1]).contiguous()


def with_rank(stacked: Tensor, rank: int) -> Tensor:
    """Return `[K, *shape]` with ones after K, so that values of different ranks broadcast as those of one learner."""
    missing = rank + 1 - stacked.ndim
    return stacked[(slice(None), *(None,) * missing)] if missing > 0 else stacked


def of_learner(argument: Any, learner: int, num_learners: int) -> Any:
    """Return an argument as one learner's operator would be given it."""

    def of_value(value: Fused | PerLearner) -> Tensor:
        if isinstance(value, PerLearner):
            return value.tensors[learner]
        return value.tensor if value.layout is Layout.SHARED else stack(value, num_learners)[learner]

    return map_values(argument, of_value)


def map_values(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Return an operator's argument with `function` applied to its values, also in lists."""
    if isinstance(argument, Fused | PerLearner):
        return function(argument)
    if isinstance(argument, list | tuple):
        return [map_values(entry, function) for entry in argument]
    return argument


def values_in(arguments: Sequence[Any]) -> list[Fused | PerLearner]:
    """Return all values among an operator's arguments, in order."""
    found: list[Fused | PerLearner] = []
    for argument in arguments:
        if isinstance(argument, Fused | PerLearner):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(values_in(argument))
    return found


def wrap(result: Any, layout: Layout) -> Any:
    """Return an operator's result, which may be a tuple, as values of a layout."""
    if isinstance(result, Tensor):
        return Fused(result, layout)
    if isinstance(result, list | tuple):
        return [wrap(entry, layout) for entry in result]
    return result


def stacked_results(results: Sequence[Any]) -> Any:
    """Return one operator's results for all learners as one value, as a list of values, or what they have in common."""
    first = results[0]
    if isinstance(first, Tensor):
        # One learner's result keeps its strides, so that the next operator gets what it would in eager mode.
        return Fused(first.unsqueeze(0) if len(results) == 1 else torch.stack(list(results)), Layout.STACK)
    if isinstance(first, list | tuple):
        return [stacked_results(entries) for entries in zip(*results, strict=True)]
    return first
