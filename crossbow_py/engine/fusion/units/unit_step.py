"""Runs a unit of the graph (`units.py`) for all learners: a convolution in its fastest way, the rest with kernels.

    launches           forward                                  backward
    convolution        1, with the norm's statistics            1 for both gradients
    norm, sum, ReLU    1                                        2, which add up the gradients of two users

These are the launches with the implicit-GEMM kernel; by torch's operators a convolution takes as many as they do, and
statistics take one more. Gradients of parameters are written to the bank's rows in master precision, without autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crossbow_py.engine.fusion.rules.registry import Call, Rule
from crossbow_py.engine.fusion.units.convolution import Convolution, Leaf, choices_on
from crossbow_py.engine.fusion.units.units import Unit
from crossbow_py.engine.fusion.values import Copies, Fused, Layout, channels_last, matrix_of
from crossbow_py.engine.kernels import batch_norm as norms
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.kernels.statistics import Statistics, Workspace


class Norm:
    """One layer's BatchNorm of all learners, with the residual sum and the ReLU after it."""

    def __init__(self, scale: Leaf, offset: Leaf, statistics: Statistics, relu: bool) -> None:
        self._scale, self._offset, self.statistics, self._relu = scale, offset, statistics, relu
        self._weights, self._bias = (leaf.rows.detach().flatten() for leaf in (scale, offset))
        self._workspace: Workspace | None = None

    def _space(self, x: Tensor) -> Workspace:
        """Return the workspace, made at the first call, which is never captured."""
        if self._workspace is None:
            self._workspace = norms.workspace_for(x.shape[0], x.shape[1], x.dtype, x.device)
        return self._workspace

    def forward(
        self, images: Tensor, moments: tuple[Tensor, Tensor] | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, mean and rstd."""
        x, own = matrix_of(images), self.statistics
        if moments is None:
            moments = norms.statistics(
                x, own.running_mean, own.running_var, own.momentum, own.eps, self._space(x)
            )
        added = None if residual is None else matrix_of(residual)
        y = norms.normalise(x, *moments, self._weights, self._bias, added, self._relu)
        return _images(y, images), *moments

    def backward(
        self, gradients: list[Tensor], images: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, with_residual: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Write the parameters' gradients, and return those of the images and of the residual."""
        x, given, out = matrix_of(images), [matrix_of(gradient) for gradient in gradients], matrix_of(y)
        scale, offset = (leaf.gradient.flatten() for leaf in (self._scale, self._offset))
        norms.backward_sums(given, x, out, mean, rstd, scale, offset, self._relu, self._space(x))
        dx, residual = norms.backward_inputs(
            given, x, out, mean, rstd, self._weights, scale, offset, self._relu, with_residual
        )
        return _images(dx, images), None if residual is None else _images(residual, images)


def _images(matrix: Tensor, like: Tensor) -> Tensor:
    batch, _, high, wide = like.shape
    return matrix.view(batch, high, wide, -1).permute(0, 3, 1, 2)


class _Run(torch.autograd.Function):
    """A unit for K learners: a convolution, a norm, or both, and its value once for every user."""

    @staticmethod
    def forward(
        ctx: Any,
        _: Tensor,
        inputs: Tensor,
        residual: Tensor | None,
        convolution: Convolution | None,
        norm: Norm | None,
        users: int,
    ) -> tuple[Tensor, ...]:
        ctx.convolution, ctx.norm, ctx.has_residual = convolution, norm, residual is not None
        raw, moments = inputs, None
        if convolution is not None:
            raw, moments = convolution.forward(inputs, None if norm is None else norm.statistics)
        if norm is None:
            ctx.save_for_backward(inputs)
            y = raw
        else:
            y, mean, rstd = norm.forward(raw, moments, residual)
            ctx.save_for_backward(inputs, raw, y, mean, rstd)
        return y, *(y.view_as(y) for _ in range(users - 1))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        gradients = list(given)
        if len(gradients) > 2:
            gradients = [gradients[0], torch.stack(gradients[1:]).sum(0)]
        if ctx.norm is None:
            inputs = ctx.saved_tensors[0]
            outputs, d_residual = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1], None
            outputs = channels_last(outputs)
        else:
            inputs, raw, y, mean, rstd = ctx.saved_tensors
            outputs, d_residual = ctx.norm.backward(gradients, raw, y, mean, rstd, ctx.has_residual)
        wanted: bool = ctx.needs_input_grad[1]
        if ctx.convolution is not None:
            return None, ctx.convolution.backward(outputs, inputs, wanted), d_residual, None, None, None
        return None, outputs if wanted else None, d_residual, None, None, None


class UnitRules:
    """Makes the rules that run one graph's units.

    Args:
        leaves, buffers: the bank's rows by the name of their placeholder in the graph; buffers are `[K, C]`.
        anchor: a scalar that requires a gradient, so that every unit has a backward pass.

    """

    def __init__(self, leaves: dict[str, Leaf], buffers: dict[str, Tensor], anchor: Tensor) -> None:
        self._leaves, self._buffers, self._anchor = leaves, buffers, anchor
        self._to_measure: list[tuple[Convolution, Statistics | None, bool]] = []

    def rule(self, unit: Unit, users: int) -> Rule:
        """Return the rule of a unit, which takes the images and those that are added, or None.

        It gives the value once for each of `users`: their gradients then come separately, without a launch to add them.
        """
        convolution = None if unit.convolution is None else self._convolution(*unit.convolution.args)
        norm = None if unit.norm is None else self._norm(unit.norm, unit.relu)
        if convolution is not None:
            needs_input_gradient = unit.input.op != "placeholder"  # else it is the batch
            self._to_measure.append((convolution, norm.statistics if norm else None, needs_input_gradient))

        def run(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Copies:
            images = (None if each is None else channels_last(call.channels(each)) for each in args)
            found = _Run.apply(self._anchor, *images, convolution, norm, users)  # type: ignore[no-untyped-call]
            return Copies([Fused(tensor, Layout.CHANNELS) for tensor in found])

        return run

    def measure(self) -> list[str]:
        """Take the fastest way of every convolution, on CUDA, and return messages for the user.

        Call it outside autograd and with nothing in flight, before the rules run. Blocks the host, for seconds in the
        first run of a model. Raises KernelError if convolutions fail, and what `ConvolutionChoices.choose` does.
        """
        choices = choices_on(self._anchor.device)
        if choices is None:
            return []
        for convolution, statistics, needs_input_gradient in self._to_measure:
            convolution.measure(choices, statistics, needs_input_gradient)
        return choices.notes

    def by_kernel(self) -> int:
        """Return how many directions of convolutions the kernel computes, of three each."""
        return sum(convolution.by_kernel for convolution, *_ in self._to_measure)

    def _convolution(self, images: Any, filters: Any, shift: Any = None, *options: Any) -> Convolution:
        defaults: tuple[Any, ...] = (1, 0, 1, 1)
        stride, padding, dilation, groups = options + defaults[len(options) :]
        own, (batch, channels, high, wide) = self._leaves[filters.name], images.meta["val"].shape
        num_learners, out_channels, _, *kernel = own.rows.shape
        geometry = Geometry(
            batch, num_learners * groups, channels // groups, out_channels // groups, high, wide, _pair(kernel),
            _pair(stride), _pair(padding), _pair(dilation),
        )  # fmt: skip
        return Convolution(geometry, own, None if shift is None else self._leaves[shift.name])

    def _norm(self, node: Any, relu: bool) -> Norm:
        scale, offset, mean, variance, _, momentum, eps = node.args[1:8]
        mean, variance = (None if each is None else self._buffers[each.name].flatten() for each in (mean, variance))
        statistics = Statistics(mean, variance, float(momentum), float(eps))
        return Norm(self._leaves[scale.name], self._leaves[offset.name], statistics, relu)


def _pair(value: Any) -> tuple[int, int]:
    both = list(value) if isinstance(value, list | tuple) else [value]
    return (both[0], both[-1])
