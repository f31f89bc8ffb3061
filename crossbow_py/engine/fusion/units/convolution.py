"""A layer's convolution of all learners, forward and backward, by the way that is fastest on its device.

A convolution of K learners is one grouped operator, channels-last or not, or the implicit-GEMM kernel. Which is fastest
depends on shapes, dtypes and the library, so `measure` finds out before training, for each direction (forward, gradient
of the input, gradient of the filters) by itself, as a CUDA graph runs it. Every way is compared with the first one
before its time counts. Choices are remembered in the user's cache. Where nothing is timed it is a fixed way, which is
compared all the same: a compiler may get the kernel of one size wrong and that of the next one right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Literal, get_args

import torch
import triton
from torch import Tensor, nn

from crossbow_py.core.measured import Remembered, digest
from crossbow_py.core.triton_launch import KernelError, unavailable
from crossbow_py.core.version import __version__
from crossbow_py.engine.device.cudnn import must_repeat, searching_libraries, uses_tf32
from crossbow_py.engine.device.graphs import failed_capture, graph_milliseconds
from crossbow_py.engine.device.memory import is_out_of_memory, raise_if_lost
from crossbow_py.engine.fusion.values import channels_last, matrix_of
from crossbow_py.engine.kernels import batch_norm as norms
from crossbow_py.engine.kernels import convolution as implicit
from crossbow_py.engine.kernels.geometry import Geometry, tiles_of
from crossbow_py.engine.kernels.statistics import Statistics
from crossbow_py.engine.trust import GRAPHS, why_not
from crossbow_py.engine.trust.compare import TOLERANCES, is_within

Direction = Literal["forward", "inputs", "filters"]
_DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
IMPLICIT, GROUPED, GROUPED_NCHW = "implicit_gemm", "grouped_nhwc", "grouped_nchw"


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
    """Return all ways that may be used; the first is the one that others are compared with."""
    found = [GROUPED, GROUPED_NCHW]
    if dtype in (torch.float32, torch.bfloat16) and (why_not("convolutions", device) or unavailable(device)) is None:
        found.append(IMPLICIT)
    return found


def fixed_way(dtype: torch.dtype, device: torch.device) -> str:
    """Return the way where nothing is timed: the kernel if it can be used, else the first."""
    possible = ways(dtype, device)
    return IMPLICIT if IMPLICIT in possible else possible[0]


class ConvolutionChoices:
    """The fastest way of each layer and direction: remembered, or measured, until a capture fails in this process.

    Args:
        device: where ways run.
        milliseconds: measures how long a way takes; raises if it fails. None if ways are only to be compared.
        remembered: the choices of earlier runs.

    Attributes:
        notes: messages for the user about ways that failed or gave other numbers.
    """

    def __init__(
        self, device: torch.device, milliseconds: Callable[[Callable[[], Tensor]], float] | None, remembered: Remembered
    ) -> None:
        self._device, self._milliseconds, self._remembered = device, milliseconds, remembered
        self._known: dict[str, str] = {}
        self._said: set[str] = set()
        self.notes: list[str] = []

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Tensor]], default: str) -> str:
        """Return the fastest candidate, or `default` if nothing is timed and it gives the numbers of the first.

        The first is right by definition. If it fails, there is nothing to compare with, and `default` is returned.
        Nothing is timed once a capture has failed in this process. Blocks the host while it measures.
        Raises KernelError if that is the first, and whatever says that memory has run out or the device is lost.
        """
        if key not in self._known:
            self._known[key] = self._settle(key, candidates, default)
        return self._known[key]

    def _settle(self, key: str, candidates: Mapping[str, Callable[[], Tensor]], default: str) -> str:
        first, recalled = next(iter(candidates)), ""
        if self._milliseconds is None or failed_capture():
            return self._compared(candidates, default)
        with contextlib.suppress(OSError):
            recalled = self._remembered.recall(key) or ""
        if recalled == first:
            return first
        try:
            expected = _finite(candidates[first])
        except Exception as error:  # libraries raise anything
            return self._without_first(first, default, error)
        # A remembered way may have been compiled by another compiler since.
        if recalled in candidates and self.is_right(recalled, candidates[recalled], expected):
            return recalled
        right = {first: candidates[first]}
        others = {name: run for name, run in candidates.items() if name not in (first, recalled)}
        right |= {name: run for name, run in others.items() if self.is_right(name, run, expected)}
        times = {name: time for name, run in right.items() if (time := self._time(name, run)) is not None}
        if failed_capture():
            return self._untimed(default if default in right else first)
        found = min(times, key=lambda name: times[name], default=first)
        if first in times and len(times) > 1:
            with contextlib.suppress(OSError):
                self._remembered.remember(key, found)
        return found

    def _compared(self, candidates: Mapping[str, Callable[[], Tensor]], default: str) -> str:
        """Return the default if it gives the numbers of the first candidate, else that."""
        first = next(iter(candidates))
        if default == first:
            return self._untimed(first)
        try:
            expected = _finite(candidates[first])
        except Exception as error:
            return self._without_first(first, default, error)
        return self._untimed(default if self.is_right(default, candidates[default], expected) else first)

    def _untimed(self, way: str) -> str:
        if failed := failed_capture():
            self._note(f"Convolutions run by fixed ways where they were not measured yet, because {failed}.")
        return way

    def _without_first(self, first: str, default: str, error: Exception) -> str:
        self._raise_if_final(error)
        reason = f"{first}, which others are compared with, failed: {_text_of(error)}"
        if default == first:
            raise KernelError(f"convolutions cannot be measured: {reason}") from error
        self._note(f"Convolutions that cannot be measured run as {default}: {reason}.")
        return default

    def is_right(self, name: str, run: Callable[[], Tensor], expected: Tensor) -> bool:
        """Return whether a way gives the numbers expected; if not, say so. Blocks the host."""
        try:
            if is_within(run(), expected, TOLERANCES[expected.dtype].kernel):  # a host–device synchronisation
                return True
        except Exception as error:  # compilers and libraries raise anything
            self._failed(name, error)
            return False
        self._note(f"Convolutions never run as {name}, which gave other numbers than the others.")
        return False

    def _time(self, name: str, run: Callable[[], Tensor]) -> float | None:
        if self._milliseconds is None or failed_capture():
            return None
        try:
            return self._milliseconds(run)
        except Exception as error:  # for example if it cannot be captured
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: Exception) -> None:
        self._raise_if_final(error)
        if failed_capture() is None:  # which has a note of its own
            self._note(f"Convolutions never run as {name}, which failed: {_text_of(error)}.")

    def _raise_if_final(self, error: Exception) -> None:
        """Raise an error that is not the way's own fault."""
        raise_if_lost(error, self._device)
        if is_out_of_memory(error):
            raise error

    def _note(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.notes.append(sentence)


def choices_on(device: torch.device) -> ConvolutionChoices | None:
    """Return choices that measure ways as a CUDA graph runs them; None on other devices, and without the kernel.

    They only compare where graphs may not be used, and if results must repeat, which do not if another way is the
    fastest the next time.
    """
    if device.type != "cuda" or why_not("convolutions", device):
        return None
    is_timed = not (must_repeat() or why_not(GRAPHS, device) or failed_capture())
    return ConvolutionChoices(device, graph_milliseconds(device) if is_timed else None, Remembered("convolutions.json"))


def key_of(
    sizes: Geometry, direction: Direction, dtype: torch.dtype, device: torch.device, *, bias: bool = False,
    statistics: bool = False,
) -> str:  # fmt: skip
    """Return the key of a choice: a hash of all it depends on. Forward, `bias` and `statistics` are added or not.

    Numbers of groups share a choice up to each power of two if they have the same tiles, or every step of the
    auto-tuner would measure for seconds.
    """
    tiles = tiles_of(sizes)
    tiles = replace(tiles, filters=replace(tiles.filters, splits=1))
    sizes = replace(sizes, groups=1 << (sizes.groups - 1).bit_length())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, triton.__version__, __version__]
    facts = [repr(sizes), repr(tiles), direction, str(dtype), bias, statistics, where, *versions, uses_tf32()]
    return f"{direction} {digest(facts)}"


@dataclass(frozen=True)
class Leaf:
    """A parameter of a unit: its rows `[K, *shape]`, and those of its gradients, with the same shape and strides."""

    rows: Tensor
    gradient: Tensor


class Convolution:
    """One layer's convolution of all learners, with a way for each direction.

    Args:
        geometry: the sizes.
        filters, shift: the layer's parameters; shift may be None.
    """

    def __init__(self, geometry: Geometry, filters: Leaf, shift: Leaf | None) -> None:
        self._geometry, self._filters, self._shift = geometry, filters, shift
        self._weights = filters.rows.detach().flatten(0, 1)
        self._bias = None if shift is None else shift.rows.detach().flatten(0, 1)
        self._operators, device = Operators(geometry), self._weights.device
        self._workspace = implicit.backward_workspace(geometry, device)
        self._moments_workspace = implicit.statistics_workspace(geometry, device)
        self._ways = dict.fromkeys(_DIRECTIONS, fixed_way(self._weights.dtype, device))

    @property
    def by_kernel(self) -> int:
        """How many of the three directions are the kernel's."""
        return list(self._ways.values()).count(IMPLICIT)

    @torch.no_grad()
    def measure(self, choices: ConvolutionChoices, statistics: Statistics | None, input_gradient: bool) -> None:
        """Take the fastest way of each direction, on random values: a round's may be zero or not finite.

        Enqueues on the current stream and on one of its own, and blocks the host. Nothing of the bank is written.

        Args:
            choices: chooses.
            statistics: those of the BatchNorm after it, if there is one; the kernel computes them as well, and the
                other ways are followed by a pass that does.
            input_gradient: whether the gradient of the inputs is needed.
        """
        g, weights = self._geometry, self._weights
        generator = torch.Generator(weights.device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return channels_last(torch.randn(shape, generator=generator, device=weights.device, dtype=weights.dtype))

        images = drawn(g.batch, g.groups * g.in_channels, g.height, g.width)
        given, filters = drawn(g.batch, len(weights), *g.out_size), drawn(*weights.shape)
        own = None if statistics is None else _copied(statistics)  # each try moves the running ones
        workspace = norms.workspace_for(g.out_rows, len(weights), weights.dtype, weights.device)

        def moments_of(outputs: Tensor) -> tuple[Tensor, Tensor]:
            assert own is not None, "called with statistics alone"
            running = own.running_mean, own.running_var
            return norms.statistics(matrix_of(outputs), *running, own.momentum, own.eps, workspace)

        def tried(direction: Direction, way: str) -> Tensor:
            if direction == "forward":
                outputs, moments = self._outputs(images, filters, way, own)
                if own is not None and moments is None:
                    moments_of(outputs)
                return outputs
            return self._gradient(given, images, filters, way, of_inputs=direction == "inputs")

        for direction in _DIRECTIONS if input_gradient else ("forward", "filters"):
            forward = direction == "forward"
            key = key_of(
                g, direction, weights.dtype, weights.device, bias=forward and self._bias is not None,
                statistics=forward and own is not None,
            )  # fmt: skip
            runs = {way: partial(tried, direction, way) for way in ways(weights.dtype, weights.device)}
            self._ways[direction] = choices.choose(key, runs, self._ways[direction])
        if input_gradient:
            self._compare_both(choices, given, images, filters)
        else:
            self._ways.pop("inputs", None)
        if own is not None and self._ways["forward"] == IMPLICIT:
            outputs, moments = self._outputs(images, filters, IMPLICIT, own)
            assert moments is not None, "the kernel computes them"
            self._compare_moments(choices, moments, moments_of(outputs))

    def _compare_moments(
        self, choices: ConvolutionChoices, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
    ) -> None:
        """Compare the mean and rstd that the kernel computes in passing with those of a pass over its outputs."""
        for place, each in enumerate(expected):
            if not choices.is_right(f"{IMPLICIT} with statistics", partial(itemgetter(place), found), each):
                self._ways["forward"] = GROUPED

    def _compare_both(self, choices: ConvolutionChoices, given: Tensor, images: Tensor, filters: Tensor) -> None:
        """Compare one launch for both gradients with one launch each, which is another kernel, compared before."""
        if self._ways["inputs"] != IMPLICIT or self._ways["filters"] != IMPLICIT:
            return
        own = self._new_gradient(filters)

        def together(of_inputs: bool) -> Tensor:
            found = self._implicit(given, images, filters, True, own)
            assert found is not None, "it was asked for"
            return found if of_inputs else own

        for of_inputs in (True, False):
            alone = self._gradient(given, images, filters, IMPLICIT, of_inputs=of_inputs)
            if not choices.is_right(f"{IMPLICIT} of both gradients", partial(together, of_inputs), alone):
                self._ways["filters"] = GROUPED
                return

    def _new_gradient(self, filters: Tensor) -> Tensor:
        """Return memory for a gradient of filters, in the bank's dtype: the kernel of another one is another kernel."""
        return torch.empty_like(filters, dtype=self._filters.gradient.dtype)

    def forward(self, inputs: Tensor, statistics: Statistics | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the outputs, and their mean and rstd `[K·C]` if the kernel computes them in the same pass."""
        g = self._geometry
        sizes = (g.batch, g.groups * g.in_channels, g.height, g.width)
        assert (inputs.shape, inputs.dtype) == (sizes, self._weights.dtype), "images are as they were exported"
        return self._outputs(inputs, self._weights, self._ways["forward"], statistics)

    def _outputs(
        self, inputs: Tensor, filters: Tensor, way: str, statistics: Statistics | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        if way != IMPLICIT:
            with searching_libraries():
                return self._operators.forward(way, inputs, filters, self._bias), None
        return implicit.forward(inputs, filters, self._bias, self._geometry, statistics, self._moments_workspace)

    def backward(self, outputs: Tensor, inputs: Tensor, input_gradient: bool) -> Tensor | None:
        """Write the parameters' gradients, and return that of the inputs if `input_gradient`."""
        of_filters, of_inputs = self._ways["filters"], self._ways.get("inputs", GROUPED)
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
            outputs, inputs, filters, self._geometry, input_gradient=of_inputs, filter_gradient=gradient,
            workspace=self._workspace,
        )  # fmt: skip

    def _gradient(self, outputs: Tensor, inputs: Tensor, filters: Tensor, way: str, *, of_inputs: bool) -> Tensor:
        """Return the gradient of the inputs or of the filters, in a new tensor."""
        if way != IMPLICIT:
            with searching_libraries():
                return self._operators.gradient(way, outputs, inputs, filters, of_inputs)
        own = None if of_inputs else self._new_gradient(filters)
        found = self._implicit(outputs, inputs, filters, of_inputs, own)
        gradient = found if of_inputs else own
        assert gradient is not None, "one of the two was asked for"
        return gradient


def _finite(run: Callable[[], Tensor]) -> Tensor:
    found = run()
    if not bool(found.isfinite().all()):  # host–device synchronisation
        raise ArithmeticError("it gave values that are not finite")
    return found


def _copied(statistics: Statistics) -> Statistics:
    running = statistics.running_mean, statistics.running_var
    mean, variance = (None if each is None else each.clone() for each in running)
    return replace(statistics, running_mean=mean, running_var=variance)


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
