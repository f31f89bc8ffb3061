"""One layer's convolution of all learners, forward and backward, with the fastest way for each direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbow_py.engine.fusion.units.branches import Branches
from crossbow_py.engine.fusion.units.convolution import (
    IMPLICIT,
    ConvolutionChoices,
    Direction,
    Operators,
    key_of,
    searching_libraries,
    ways,
)
from crossbow_py.engine.fusion.values import channels_last
from crossbow_py.engine.kernels import convolution as implicit
from crossbow_py.engine.kernels.geometry import Geometry


@dataclass(frozen=True)
class Leaf:
    """A parameter of a unit: its rows `[K, *shape]`, and those of its gradients, with the same shape and strides."""

    rows: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Statistics:
    """A norm's running mean and variance `[K·C]`, which are updated in place, or None; its momentum and ε."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float


class Convolution:
    """One layer's convolution of all learners, with a way for each direction.

    Args:
        node_args: the arguments of `conv2d` after filters and shift: stride, padding, dilation, groups.
        filters, shift: the layer's parameters; shift may be None.
        num_learners: K.
        choices: chooses the ways.
        branches: the streams of ways that fork.
    """

    def __init__(
        self,
        node_args: tuple[Any, ...],
        filters: Leaf,
        shift: Leaf | None,
        num_learners: int,
        choices: ConvolutionChoices,
        branches: Branches,
    ) -> None:
        defaults: tuple[Any, ...] = (1, 0, 1, 1)
        stride, padding, dilation, groups = node_args + defaults[len(node_args) :]
        self._options = _pair(stride), _pair(padding), _pair(dilation)
        self._groups, self._choices, self._branches = groups * num_learners, choices, branches
        self._filters, self._shift = filters, shift
        self._weights = filters.rows.detach().flatten(0, 1)
        self._bias = None if shift is None else shift.rows.detach().flatten(0, 1)
        self._geometry: Geometry | None = None
        self._ways: dict[Direction, str] = {}

    def _prepare(self, inputs: Tensor) -> Geometry:
        """Return the sizes. At the first call, which is never captured, make the kernels' workspaces."""
        if self._geometry is None:
            out, own, high, wide = self._weights.shape
            self._geometry = Geometry(
                inputs.shape[0], self._groups, own, out // self._groups, inputs.shape[2], inputs.shape[3], (high, wide),
                *self._options,
            )  # fmt: skip
            self._operators = Operators(self._geometry, self._branches)
            self._workspace = implicit.backward_workspace(self._geometry, inputs.device)
            self._moments_workspace = implicit.statistics_workspace(self._geometry, inputs.device)
        return self._geometry

    def _way(self, direction: Direction, inputs: Tensor, statistics: Statistics | None = None) -> str:
        """Return the way, chosen at the first call on random values: a round's may be zero or not finite."""
        if direction not in self._ways:
            geometry = self._prepare(inputs)
            generator = torch.Generator(inputs.device).manual_seed(0)
            outputs = inputs.new_empty(geometry.batch, len(self._weights), *geometry.out_size)
            tried = Tried(*(_random_like(value, generator) for value in (inputs, outputs, self._weights)))
            found = ways(geometry, inputs.dtype, inputs.device)
            key = key_of(geometry, direction, inputs.dtype, inputs.device)
            runs = {way: partial(self._try, direction, way, tried, statistics) for way in found}
            self._ways[direction] = self._choices.choose(key, runs)
        return self._ways[direction]

    def _try(self, direction: Direction, way: str, tried: Tried, statistics: Statistics | None) -> Tensor:
        if direction == "forward":
            return self._outputs(tried.inputs, tried.filters, way, statistics)[0]
        return self._gradient(tried.outputs, tried.inputs, tried.filters, way, of_inputs=direction == "inputs")

    def forward(self, inputs: Tensor, statistics: Statistics | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the outputs, and their mean and rstd `[K·C]` if the kernel computes them in the same pass."""
        # Ways are tried with statistics, as they will run, but without running ones: each try would move those.
        own = None if statistics is None else replace(statistics, running_mean=None, running_var=None)
        return self._outputs(inputs, self._weights, self._way("forward", inputs, own), statistics)

    def _outputs(
        self, inputs: Tensor, filters: Tensor, way: str, statistics: Statistics | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        geometry = self._prepare(inputs)
        if way != IMPLICIT:
            with searching_libraries():
                return self._operators.forward(way, inputs, filters, self._bias), None
        if statistics is None:
            return implicit.forward(inputs, filters, self._bias, geometry), None
        mean, rstd = (torch.empty(len(filters), device=inputs.device) for _ in range(2))
        moments = implicit.Moments(
            mean, rstd, statistics.running_mean, statistics.running_var, statistics.momentum, statistics.eps,
            self._moments_workspace,
        )  # fmt: skip
        return implicit.forward(inputs, filters, self._bias, geometry, moments), (mean, rstd)

    def backward(self, outputs: Tensor, inputs: Tensor, input_gradient: bool) -> Tensor | None:
        """Write the parameters' gradients, and return that of the inputs if `input_gradient`."""
        of_filters = self._way("filters", inputs)
        of_inputs = self._way("inputs", inputs) if input_gradient else IMPLICIT
        if self._shift is not None:
            summed = outputs.sum((0, 2, 3), dtype=self._shift.gradient.dtype)
            self._shift.gradient.flatten(0, 1).copy_(summed)
        if of_filters != IMPLICIT:
            found = self._gradient(outputs, inputs, self._weights, of_filters, of_inputs=False)
            self._filters.gradient.flatten(0, 1).copy_(found)
        else:
            both = input_gradient and of_inputs == IMPLICIT
            found_too = self._implicit(outputs, inputs, self._weights, both, self._filters.gradient)
            if both:
                return found_too
        if not input_gradient:
            return None
        return self._gradient(outputs, inputs, self._weights, of_inputs, of_inputs=True)

    def _implicit(
        self, outputs: Tensor, inputs: Tensor, filters: Tensor, of_inputs: bool, gradient: Tensor | None
    ) -> Tensor | None:
        return implicit.backward(
            outputs, inputs, filters, self._prepare(inputs), input_gradient=of_inputs, filter_gradient=gradient,
            workspace=self._workspace,
        )  # fmt: skip

    def _gradient(self, outputs: Tensor, inputs: Tensor, filters: Tensor, way: str, *, of_inputs: bool) -> Tensor:
        """Return the gradient of the inputs or of the filters, in a new tensor."""
        if way != IMPLICIT:
            with searching_libraries():
                return self._operators.gradient(way, outputs, inputs, filters, of_inputs)
        own = None if of_inputs else torch.empty_like(filters)
        found = self._implicit(outputs, inputs, filters, of_inputs, own)
        gradient = found if of_inputs else own
        assert gradient is not None, "one of the two was asked for"
        return gradient


class Tried(NamedTuple):
    """Values to compare and time ways with: inputs, the outputs' gradient, and filters."""

    inputs: Tensor
    outputs: Tensor
    filters: Tensor


def _random_like(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal values, channels-last."""
    values = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
    return channels_last(values)


def _pair(value: Any) -> tuple[int, int]:
    both = list(value) if isinstance(value, list | tuple) else [value]
    return (both[0], both[-1])
