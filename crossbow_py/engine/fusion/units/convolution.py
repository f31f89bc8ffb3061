"""A layer's convolution of all learners, forward and backward, by the way that is fastest on its device.

A convolution of K learners is one grouped operator, channels-last or not, or the implicit-GEMM kernel. Which is fastest
depends on shapes, dtypes and the library, so it is measured in a layer's first rounds, as a CUDA graph runs it, for
each direction (forward, gradient of the input, gradient of the filters) by itself. Every way is compared with the first
one before its time counts. Choices are remembered in the user's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import triton
from torch import Tensor, nn

from crossbow_py.core.measured import Remembered, digest
from crossbow_py.core.triton_launch import unavailable
from crossbow_py.core.version import __version__
from crossbow_py.engine.device.graphs import graph_milliseconds
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.values import channels_last
from crossbow_py.engine.kernels import convolution as implicit
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.kernels.statistics import Statistics

Direction = Literal["forward", "inputs", "filters"]
IMPLICIT, GROUPED, GROUPED_NCHW = "implicit_gemm", "grouped_nhwc", "grouped_nchw"
# Tolerances relative to the largest value: bfloat16 has 8 bits, TF32 10, and sums are long.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-2, torch.float64: 1e-10}


class Operators:
    """A convolution of all learners by torch's operators, on channels-last images `[B, G·C, H, W]`."""

    def __init__(self, sizes: Geometry) -> None:
        self._sizes = sizes

    def forward(self, way: str, inputs: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, channels-last. Filters are `[G·O, C, KH, KW]`."""
        if way == GROUPED_NCHW:
            return channels_last(self._conv(inputs.contiguous(), filters.contiguous(), bias))
        return self._conv(inputs, filters, bias)

    def gradient(self, way: str, outputs: Tensor, inputs: Tensor, filters: Tensor, of_inputs: bool) -> Tensor:
        """Return the gradient of the inputs, channels-last, or of the filters."""
        if way == GROUPED_NCHW:
            found = self._backward(outputs.contiguous(), inputs.contiguous(), filters.contiguous(), of_inputs)
            return channels_last(found) if of_inputs else found
        return self._backward(outputs, inputs, filters, of_inputs)

    def _conv(self, inputs: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        s = self._sizes
        return nn.functional.conv2d(inputs, filters, bias, s.stride, s.padding, s.dilation, s.groups)

    def _backward(self, outputs: Tensor, inputs: Tensor, filters: Tensor, of_inputs: bool) -> Tensor:
        s = self._sizes
        found = torch.ops.aten.convolution_backward(
            outputs, inputs, filters, None, s.stride, s.padding, s.dilation, False, [0, 0], s.groups,
            [of_inputs, not of_inputs, False],
        )  # fmt: skip
        gradient: Tensor = found[0] if of_inputs else found[1]
        return gradient


def ways(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return all ways that can be used; the first is the one that others are compared with."""
    found = [GROUPED, GROUPED_NCHW]
    if dtype in (torch.float32, torch.bfloat16) and unavailable(device) is None:
        found.append(IMPLICIT)
    return found


class ConvolutionChoices:
    """The way of each layer and direction: remembered, or measured at first use.

    Args:
        milliseconds: measures how long a way takes; raises if it fails.
        remembered: the choices of earlier runs.

    Attributes:
        notes: messages for the user about ways that failed or gave other numbers; the reader clears it.
    """

    def __init__(self, milliseconds: Callable[[Callable[[], Tensor]], float], remembered: Remembered) -> None:
        self._milliseconds, self._remembered = milliseconds, remembered
        self._known: dict[str, str] = {}
        self._said: set[str] = set()
        self.notes: list[str] = []

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Tensor]]) -> str:
        """Return the fastest candidate; the first is right by definition. Measuring blocks the host."""
        if key not in self._known:
            self._known[key] = self._settle(key, candidates)
        return self._known[key]

    def _settle(self, key: str, candidates: Mapping[str, Callable[[], Tensor]]) -> str:
        first, recalled = next(iter(candidates)), ""
        with contextlib.suppress(OSError):
            recalled = self._remembered.recall(key) or ""
        if recalled == first:
            return first
        expected = candidates[first]()
        # A remembered way may have been compiled by another compiler since.
        if recalled in candidates and self._is_right(recalled, candidates[recalled], expected):
            return recalled
        right = {first: candidates[first]}
        others = {name: run for name, run in candidates.items() if name not in (first, recalled)}
        right |= {name: run for name, run in others.items() if self._is_right(name, run, expected)}
        times = {name: time for name, run in right.items() if (time := self._time(name, run)) is not None}
        found = min(times, key=lambda name: times[name], default=first)
        with contextlib.suppress(OSError):
            self._remembered.remember(key, found)
        return found

    def _is_right(self, name: str, run: Callable[[], Tensor], expected: Tensor) -> bool:
        try:
            distance = (run().double() - expected.double()).abs().amax()
            # False for NaN; a host–device synchronisation.
            if distance <= _TOLERANCE[expected.dtype] * expected.abs().amax().double():
                return True
        except Exception as error:  # compilers and libraries raise anything
            self._failed(name, error)
            return False
        self._note(f"Convolutions never run as {name}, which gave other numbers than the others.")
        return False

    def _time(self, name: str, run: Callable[[], Tensor]) -> float | None:
        try:
            return self._milliseconds(run)
        except Exception as error:  # for example if it cannot be captured
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: Exception) -> None:
        if is_out_of_memory(error):
            raise error
        self._note(f"Convolutions never run as {name}, which failed: {' '.join(str(error).split())[:160]}.")

    def _note(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.notes.append(sentence)


class Unmeasured(ConvolutionChoices):
    """The choice of the kernel if it can be used, else of the first way."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0.0, Remembered("convolutions.json"))

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Tensor]]) -> str:
        return IMPLICIT if IMPLICIT in candidates else next(iter(candidates))


def choices_on(device: torch.device) -> ConvolutionChoices:
    """Return choices that measure ways as a CUDA graph runs them; on other devices nothing is measured."""
    if device.type != "cuda":
        return Unmeasured()
    return ConvolutionChoices(graph_milliseconds(device), Remembered("convolutions.json"))


def key_of(sizes: Geometry, direction: Direction, dtype: torch.dtype, device: torch.device) -> str:
    """Return the key of a choice: a hash of all it depends on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, triton.__version__, __version__]
    facts = [repr(sizes), direction, str(dtype), where, *versions, torch.backends.cudnn.allow_tf32]
    return f"{direction} {digest(facts)}"


@contextlib.contextmanager
def searching_libraries() -> Iterator[None]:
    """Have cuDNN try its algorithms for each new shape in the block, and keep the fastest."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(
        enabled=cudnn.enabled, benchmark=True, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32
    ):
        yield


@dataclass(frozen=True)
class Leaf:
    """A parameter of a unit: its rows `[K, *shape]`, and those of its gradients, with the same shape and strides."""

    rows: Tensor
    gradient: Tensor


class Convolution:
    """One layer's convolution of all learners, with a way for each direction.

    Args:
        node_args: the arguments of `conv2d` after filters and shift: stride, padding, dilation, groups.
        filters, shift: the layer's parameters; shift may be None.
        choices: chooses the ways.
    """

    def __init__(
        self,
        node_args: tuple[Any, ...],
        filters: Leaf,
        shift: Leaf | None,
        choices: ConvolutionChoices,
    ) -> None:
        defaults: tuple[Any, ...] = (1, 0, 1, 1)
        stride, padding, dilation, groups = node_args + defaults[len(node_args) :]
        self._options = _pair(stride), _pair(padding), _pair(dilation)
        self._groups, self._choices = groups * len(filters.rows), choices
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
            self._operators = Operators(self._geometry)
            self._workspace = implicit.backward_workspace(self._geometry, inputs.device)
            self._moments_workspace = implicit.statistics_workspace(self._geometry, inputs.device)
        return self._geometry

    def _way(self, direction: Direction, inputs: Tensor, statistics: Statistics | None = None) -> str:
        """Return the way, chosen at the first call on random values: a round's may be zero or not finite."""
        if direction not in self._ways:
            geometry = self._prepare(inputs)
            generator = torch.Generator(inputs.device).manual_seed(0)
            outputs = inputs.new_empty(geometry.batch, len(self._weights), *geometry.out_size)
            images, given, filters = (
                channels_last(torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype))
                for like in (inputs, outputs, self._weights)
            )

            def tried(way: str) -> Tensor:
                if direction == "forward":
                    return self._outputs(images, filters, way, statistics)[0]
                return self._gradient(given, images, filters, way, of_inputs=direction == "inputs")

            runs = {way: partial(tried, way) for way in ways(inputs.dtype, inputs.device)}
            key = key_of(geometry, direction, inputs.dtype, inputs.device)
            self._ways[direction] = self._choices.choose(key, runs)
        return self._ways[direction]

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
        return implicit.forward(inputs, filters, self._bias, geometry, statistics, self._moments_workspace)

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


def _pair(value: Any) -> tuple[int, int]:
    both = list(value) if isinstance(value, list | tuple) else [value]
    return (both[0], both[-1])
