"""The ways to convolve for all learners, and the choice of the fastest for a layer on a device.

A convolution of K learners can be one grouped operator (channels-last or not), an operator for each group on streams
that fork and join, one dense operator whose filters are zero between learners, or the implicit-GEMM kernel. Which is
fastest depends on shapes, dtypes and the library, so it is measured in a layer's first rounds, as a CUDA graph runs it,
for each direction (forward, gradient of the input, gradient of the filters) by itself. Every way is compared with the
first one before its time counts. Choices are remembered in the user's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Literal

import torch
from torch import Tensor, nn

from crossbow_py.core.measured import Remembered, digest
from crossbow_py.core.triton_launch import unavailable
from crossbow_py.core.version import __version__
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.units.branches import Branches
from crossbow_py.engine.fusion.values import channels_last
from crossbow_py.engine.kernels.geometry import Geometry

Direction = Literal["forward", "inputs", "filters"]
IMPLICIT, GROUPED, GROUPED_NCHW = "implicit_gemm", "grouped_nhwc", "grouped_nchw"
BRANCHES, DENSE = "branches", "block_diagonal"
# Tolerances relative to the largest value: bfloat16 has 8 bits, TF32 10, and sums are long.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-2, torch.float64: 1e-10}
# Dense filters, mostly zeros, cost as many products as learners squared; beyond this they are never faster.
_MOST_DENSE_CHANNELS = 1024
_MOST_BRANCHES = 32


class Operators:
    """A convolution of all learners by torch's operators, in four ways, on channels-last images `[B, G·C, H, W]`."""

    def __init__(self, sizes: Geometry, branches: Branches) -> None:
        self._sizes, self._branches = sizes, branches

    def forward(self, way: str, inputs: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, channels-last. Filters are `[G·O, C, KH, KW]`."""
        s = self._sizes
        if way == GROUPED_NCHW:
            return channels_last(self._conv(inputs.contiguous(), filters.contiguous(), bias, s.groups))
        if way == DENSE:
            return self._conv(inputs, self._dense(filters), bias, 1)
        if way == BRANCHES:
            groups = self._split(inputs, filters, bias)
            each = self._branches.run([partial(self._conv, *group, 1) for group in groups])
            return channels_last(torch.cat(each, 1))
        return self._conv(inputs, filters, bias, s.groups)

    def gradient(self, way: str, outputs: Tensor, inputs: Tensor, filters: Tensor, of_inputs: bool) -> Tensor:
        """Return the gradient of the inputs, channels-last, or of the filters."""
        s = self._sizes
        if way == GROUPED_NCHW:
            given = (outputs.contiguous(), inputs.contiguous(), filters.contiguous())
            found = self._backward(*given, s.groups, of_inputs)
            return channels_last(found) if of_inputs else found
        if way == DENSE:
            found = self._backward(outputs, inputs, self._dense(filters), 1, of_inputs)
            return found if of_inputs else self._diagonal(found)
        if way == BRANCHES:
            groups = zip(torch.split(outputs, s.out_channels, 1), self._split(inputs, filters, None), strict=True)
            bodies = [
                partial(self._backward, channels_last(out), group[0], group[1], 1, of_inputs) for out, group in groups
            ]
            each = self._branches.run(bodies)
            return channels_last(torch.cat(each, 1)) if of_inputs else torch.cat(each, 0)
        return self._backward(outputs, inputs, filters, s.groups, of_inputs)

    def _conv(self, inputs: Tensor, filters: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        s = self._sizes
        return nn.functional.conv2d(inputs, filters, bias, s.stride, s.padding, s.dilation, groups)

    def _backward(self, outputs: Tensor, inputs: Tensor, filters: Tensor, groups: int, of_inputs: bool) -> Tensor:
        s = self._sizes
        found = torch.ops.aten.convolution_backward(
            outputs, inputs, filters, None, s.stride, s.padding, s.dilation, False, [0, 0], groups,
            [of_inputs, not of_inputs, False],
        )  # fmt: skip
        gradient: Tensor = found[0] if of_inputs else found[1]
        return gradient

    def _split(
        self, inputs: Tensor, filters: Tensor, bias: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        s = self._sizes
        biases: Sequence[Tensor | None] = [None] * s.groups if bias is None else torch.split(bias, s.out_channels)
        own = zip(
            torch.split(inputs, s.in_channels, 1), torch.split(filters, s.out_channels), biases, strict=True
        )
        return [(channels_last(images), weights, shift) for images, weights, shift in own]

    def _dense(self, filters: Tensor) -> Tensor:
        """Return filters `[G·O, G·C, KH, KW]` with zeros between groups, channels-last."""
        s = self._sizes
        whole = filters.new_zeros(s.groups, s.out_channels, *s.kernel, s.groups, s.in_channels)
        own = filters.permute(0, 2, 3, 1).reshape(s.groups, s.out_channels, *s.kernel, s.in_channels)
        whole.diagonal(0, 0, 4).copy_(own.movedim(0, -1))
        return whole.view(s.groups * s.out_channels, *s.kernel, -1).permute(0, 3, 1, 2)

    def _diagonal(self, dense: Tensor) -> Tensor:
        """Return the gradient of filters `[G·O, C, KH, KW]` from that of dense filters."""
        s = self._sizes
        whole = dense.permute(0, 2, 3, 1).reshape(s.groups, s.out_channels, *s.kernel, s.groups, s.in_channels)
        own = whole.diagonal(0, 0, 4).movedim(-1, 0)
        return own.reshape(s.groups * s.out_channels, *s.kernel, s.in_channels).permute(0, 3, 1, 2)


def ways(sizes: Geometry, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return all ways that can be used; the first is the one that others are compared with."""
    found = [GROUPED, GROUPED_NCHW]
    if sizes.groups > 1:
        found += [BRANCHES] if sizes.groups <= _MOST_BRANCHES else []
        channels = sizes.groups * max(sizes.in_channels, sizes.out_channels)
        found += [DENSE] if channels <= _MOST_DENSE_CHANNELS else []
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
        first, recalled = next(iter(candidates)), self._recall(key)
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

    def _recall(self, key: str) -> str:
        with contextlib.suppress(OSError):
            return self._remembered.recall(key) or ""
        return ""

    def _is_right(self, name: str, run: Callable[[], Tensor], expected: Tensor) -> bool:
        try:
            if _agree(run(), expected):
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


def _agree(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().amax().double()
    distance = (found.double() - expected.double()).abs().amax()
    return bool(distance <= _TOLERANCE[expected.dtype] * scale)  # false for NaN; a host–device synchronisation


def key_of(sizes: Geometry, direction: Direction, dtype: torch.dtype, device: torch.device) -> str:
    """Return the key of a choice: a hash of all it depends on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [torch.__version__, _triton_version(), __version__]
    facts = [repr(sizes), direction, str(dtype), where, *versions, torch.backends.cudnn.allow_tf32]
    return f"{direction} {digest(facts)}"


def _triton_version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("triton")
    return ""


@contextlib.contextmanager
def searching_libraries() -> Iterator[None]:
    """Have cuDNN try its algorithms for each new shape in the block, and keep the fastest."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(
        enabled=cudnn.enabled, benchmark=True, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32
    ):
        yield
