"""Runs a unit of the graph (`units.py`) for all learners: a convolution in its fastest way, the rest by kernels.

    launches           forward                                  backward
    convolution        1, with the norm's statistics            1 for both gradients
    norm, sum, ReLU    1                                        2, which add up the gradients of two users

with the implicit-GEMM kernel; by torch's operators a convolution takes what they take, and statistics one more.
Gradients of parameters are written to the bank's rows, in master precision, and so never pass through autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from crossbow_py.engine.fusion.branches import Branches, graph_milliseconds
from crossbow_py.engine.fusion.convolution import (
    IMPLICIT,
    Choices,
    Direction,
    Operators,
    key_of,
    searching_libraries,
    ways,
)
from crossbow_py.engine.fusion.units import Unit
from crossbow_py.kernels import batch_norm as norms
from crossbow_py.kernels import convolution as implicit
from crossbow_py.kernels.geometry import Geometry
from crossbow_py.kernels.statistics import Workspace
from crossbow_py.user_cache import Remembered


@dataclass(frozen=True)
class Leaf:
    """A parameter of a unit: its rows `[K, *shape]`, and where their gradients go, alike in shape and memory."""

    rows: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Statistics:
    """Running mean and variance `[K·C]` of a norm, moved in place, or None; momentum and ε."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float


class Convolution:
    """One layer's convolution of all learners, each direction in a way of its own.

    Args:
        node_args: `conv2d`'s arguments behind filters and shift: stride, padding, dilation, groups.
        filters, shift: the layer's parameters; shift may be None.
        num_learners: K.
        choices: which way.
        branches: for ways that fork.
    """

    def __init__(
        self,
        node_args: tuple[Any, ...],
        filters: Leaf,
        shift: Leaf | None,
        num_learners: int,
        choices: Choices,
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
        """Sizes, and what kernels need between launches; made at the first call, which is never captured."""
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
        """Settled at the first call, on values of its own: those of a first round may be zeros, or not finite."""
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
        """Outputs, and mean and rstd `[K·C]` of them where the kernel finds them on the way."""
        # Tried with statistics, as it will run, but of its own: the norm's would move with every try.
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
        """Write the parameters' gradients; returns that of the inputs if it is wanted."""
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
        """That of the inputs or of the filters, in a tensor of its own."""
        if way != IMPLICIT:
            with searching_libraries():
                return self._operators.gradient(way, outputs, inputs, filters, of_inputs)
        own = None if of_inputs else torch.empty_like(filters)
        found = self._implicit(outputs, inputs, filters, of_inputs, own)
        gradient = found if of_inputs else own
        assert gradient is not None, "one of the two was asked for"
        return gradient


class Tried(NamedTuple):
    """Values to compare and time ways with: of inputs, of the outputs' gradient, and of filters."""

    inputs: Tensor
    outputs: Tensor
    filters: Tensor


def _random_like(images: Tensor, generator: torch.Generator) -> Tensor:
    """Normal values, channels-last."""
    values = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
    return values.contiguous(memory_format=torch.channels_last)


def _pair(value: Any) -> tuple[int, int]:
    both = list(value) if isinstance(value, list | tuple) else [value]
    return (both[0], both[-1])


class Norm:
    """One layer's BatchNorm of all learners, with what comes behind it."""

    def __init__(self, scale: Leaf, offset: Leaf, statistics: Statistics, relu: bool) -> None:
        self._scale, self._offset, self.statistics, self._relu = scale, offset, statistics, relu
        self._weights, self._bias = (leaf.rows.detach().flatten() for leaf in (scale, offset))
        self._workspace: Workspace | None = None

    def _space(self, x: Tensor) -> Workspace:
        """Made at the first call, which is never captured."""
        if self._workspace is None:
            self._workspace = norms.workspace_for(x.shape[0], x.shape[1], x.dtype, x.device)
        return self._workspace

    def forward(
        self, images: Tensor, moments: tuple[Tensor, Tensor] | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, mean and rstd."""
        x, own = _matrix(images), self.statistics
        if moments is None:
            moments = norms.statistics(
                x, own.running_mean, own.running_var, own.momentum, own.eps, self._space(x)
            )
        added = None if residual is None else _matrix(residual)
        y = norms.normalise(x, *moments, self._weights, self._bias, added, self._relu)
        return _images(y, images), *moments

    def backward(
        self, gradients: list[Tensor], images: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, with_residual: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Write the parameters' gradients; returns those of the images and of the residual."""
        x, given, out = _matrix(images), [_matrix(gradient) for gradient in gradients], _matrix(y)
        scale, offset = (leaf.gradient.flatten() for leaf in (self._scale, self._offset))
        norms.backward_sums(given, x, out, mean, rstd, scale, offset, self._relu, self._space(x))
        dx, residual = norms.backward_inputs(
            given, x, out, mean, rstd, self._weights, scale, offset, self._relu, with_residual
        )
        return _images(dx, images), None if residual is None else _images(residual, images)


def _matrix(images: Tensor) -> Tensor:
    """`[B, N, H, W]` as `[B·H·W, N]`; a view of images that are channels-last, else one copy."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1]).contiguous()


def _images(matrix: Tensor, like: Tensor) -> Tensor:
    batch, _, high, wide = like.shape
    return matrix.view(batch, high, wide, -1).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Layer:
    """What a unit is made of, for K learners; one of the two may be None. `users` is how many read its value."""

    convolution: Convolution | None
    norm: Norm | None
    users: int


def run_unit(layer: Layer, anchor: Tensor, inputs: Tensor, residual: Tensor | None) -> list[Tensor]:
    """The unit's value, once for every user: their gradients then come apart, and no launch adds them up.

    Args:
        layer: what to run.
        anchor: a scalar that needs a gradient, so that the unit has a backward pass wherever it stands.
        inputs: `[B, K·C, H, W]`, channels-last.
        residual: likewise, or None.
    """
    found: tuple[Tensor, ...] = _Run.apply(anchor, inputs, residual, layer)  # type: ignore[no-untyped-call]
    return list(found)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, inputs: Tensor, residual: Tensor | None, layer: Layer) -> tuple[Tensor, ...]:
        ctx.layer, ctx.has_residual = layer, residual is not None
        raw, moments, norm = inputs, None, layer.norm
        if layer.convolution is not None:
            raw, moments = layer.convolution.forward(inputs, None if norm is None else norm.statistics)
        if norm is None:
            ctx.save_for_backward(inputs)
            y = raw
        else:
            y, mean, rstd = norm.forward(raw, moments, residual)
            ctx.save_for_backward(inputs, raw, y, mean, rstd)
        return y, *(y.view_as(y) for _ in range(layer.users - 1))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        gradients = list(given)
        if len(gradients) > 2:
            gradients = [gradients[0], torch.stack(gradients[1:]).sum(0)]
        if layer.norm is None:
            inputs = ctx.saved_tensors[0]
            outputs, d_residual = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1], None
            outputs = outputs.contiguous(memory_format=torch.channels_last)
        else:
            inputs, raw, y, mean, rstd = ctx.saved_tensors
            outputs, d_residual = layer.norm.backward(gradients, raw, y, mean, rstd, ctx.has_residual)
        wanted: bool = ctx.needs_input_grad[1]
        if layer.convolution is not None:
            return None, layer.convolution.backward(outputs, inputs, wanted), d_residual, None
        return None, outputs if wanted else None, d_residual, None


@dataclass(frozen=True)
class Rows:
    """The bank's rows by the name of their placeholder in the graph: trained parameters, and float buffers `[K, C]`."""

    leaves: dict[str, Leaf]
    buffers: dict[str, Tensor]


class LayerMaker:
    """Makes what runs the units of one graph.

    Attributes:
        notes: sentences for the user, on convolutions; grows while ways are measured.
    """

    def __init__(self, rows: Rows, num_learners: int, device: torch.device) -> None:
        self._rows, self._num_learners = rows, num_learners
        self._branches, self._choices = Branches(device), choices_on(device)
        self.notes = self._choices.notes

    def layer(self, unit: Unit, users: int) -> Layer:
        """What runs a unit whose value is read `users` times."""
        convolution, norm = unit.convolution, unit.norm
        return Layer(
            None if convolution is None else self._convolution(convolution),
            None if norm is None else self._norm(norm, unit.relu),
            users,
        )

    def _leaf(self, node: Any) -> Leaf | None:
        return None if node is None else self._rows.leaves[node.name]

    def _running(self, node: Any) -> Tensor | None:
        return None if node is None else self._rows.buffers[node.name].flatten()

    def _convolution(self, node: Node) -> Convolution:
        own, shift = self._leaf(node.args[1]), self._leaf(node.args[2] if len(node.args) > 2 else None)
        assert own is not None, "a convolution has filters"
        return Convolution(node.args[3:], own, shift, self._num_learners, self._choices, self._branches)

    def _norm(self, node: Node, relu: bool) -> Norm:
        scale, offset, mean, variance, _, momentum, eps = list(node.args[1:8])
        own = self._leaf(scale), self._leaf(offset)
        assert own[0] is not None and own[1] is not None, "units have norms with scale and offset"  # noqa: PT018
        statistics = Statistics(self._running(mean), self._running(variance), float(momentum), float(eps))  # type: ignore[arg-type]
        return Norm(own[0], own[1], statistics, relu)


def choices_on(device: torch.device) -> Choices:
    """Ways that are measured as a CUDA graph runs them. In the interpreter nothing is worth measuring."""
    if device.type != "cuda":
        return Unmeasured()
    return Choices(graph_milliseconds(device), Remembered("convolutions.json"))


class Unmeasured(Choices):
    """The kernel where it serves, else the first way."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0.0, Remembered("convolutions.json"))

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Tensor]]) -> str:
        """See Choices."""
        return IMPLICIT if IMPLICIT in candidates else next(iter(candidates))
