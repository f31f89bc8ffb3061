"""Checks of families of kernels on a device: Triton is there, they compile, and they agree with torch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from crossbow_py.core.triton_launch import (
    KernelError,
    check_size,
    compiles,
    launches_run,
    repeated,
    require,
    unavailable,
)
from crossbow_py.engine.device.cudnn import uses_tf32
from crossbow_py.engine.kernels.geometry import Geometry, Tiles
from crossbow_py.engine.trust import why_not
from crossbow_py.engine.trust.compare import EXACT_PRODUCTS, TOLERANCES, is_within

Family = Literal["layers", "loss", "batches"]

# By device. What runs in the interpreter is as small as several programs with several tiles allow.
_ROWS, _BATCH = (20_011, 301), (64, 4)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def serves(family: Family, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None if a family may be used for values of `dtype`, else a message for the user.

    It may be used if the device and the environment allow it (`engine/trust/`). The first call for a device and dtype
    compiles and compares, which blocks the host.
    """
    reason = why_not(family, device) or unavailable(device)
    reason = reason or (_failure(family, device, dtype) if dtype in _DTYPES else f"there are no kernels for {dtype}")
    return f"Fused rounds have torch operators for the {family}, which is slower, because {reason}." if reason else None


@cache
def _failure(family: Family, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        compiles(lambda: _check(family, device, dtype))
    except KernelError as error:
        return str(error)
    return None


def _check(family: Family, device: torch.device, dtype: torch.dtype) -> None:
    from crossbow_py.data.resident import image_kernels  # noqa: PLC0415  needs Triton
    from crossbow_py.engine.kernels import cross_entropy  # noqa: PLC0415  likewise

    if family == "layers":
        # Many tiles of rows and two blocks of columns.
        check_norm(NormCase(check_size(*_ROWS), 37), device, dtype)
        if dtype != torch.float64 and why_not("convolutions", device) is None:
            # A split depth; convolutions with a layer's own sizes are compared when their ways are measured.
            sizes = Geometry(check_size(*_BATCH), 2, 5, 7, 11, 12, (3, 3), stride=(2, 1), padding=(1, 1))
            check_convolution(ConvolutionCase(sizes), device, dtype)
    else:
        {"batches": image_kernels, "loss": cross_entropy}[family].check(device, dtype)


@dataclass(frozen=True)
class NormCase:
    """A norm to compare.

    Attributes:
        rows, columns: the size of the matrix.
        relu, residual: whether there is a ReLU, and a sum before it.
        users: of the result, one or two, each with a gradient.
        running: whether there are running statistics.
    """

    rows: int
    columns: int
    relu: bool = True
    residual: bool = True
    users: int = 1
    running: bool = True


def check_norm(case: NormCase, device: torch.device, dtype: torch.dtype, interpreted: int = 2) -> None:
    """Compare a norm with torch's, forward and backward; see `repeated` for `interpreted`.

    Raises KernelError if they differ. Blocks the host.
    """
    from crossbow_py.engine.kernels import batch_norm as norms  # noqa: PLC0415  likewise

    rows, columns, generator = case.rows, case.columns, torch.Generator(device).manual_seed(0)
    x, residual, *given = (
        torch.randn(rows, columns, generator=generator, device=device).to(dtype) for _ in range(2 + case.users)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale, offset = (torch.rand(columns, generator=generator, device=device).to(wide) + 0.5 for _ in range(2))
    leaves = [value.double().requires_grad_() for value in (x, scale, offset, residual)][: 3 + case.residual]
    moved_so_far = [torch.ones(columns, dtype=torch.float64, device=device) for _ in range(2)]
    out = nn.functional.batch_norm(
        leaves[0], moved_so_far[0], moved_so_far[1], leaves[1], leaves[2], training=True, momentum=0.1, eps=1e-5
    )
    out = out + leaves[3] if case.residual else out
    if case.relu:
        # Gradients are left out where rounding decides on which side of zero the sum is.
        given = [each * (out.detach().abs() > TOLERANCES[dtype].kernel) for each in given]
        out = out.relu()
    space = norms.workspace_for(rows, columns, dtype, device)

    def run() -> list[Tensor]:
        moved, sums = (
            [make(columns, dtype=wide, device=device) for _ in range(2)] for make in (torch.ones, torch.zeros)
        )
        running = moved if case.running else (None, None)
        mean, rstd = norms.statistics(x, running[0], running[1], 0.1, 1e-5, space)
        y = norms.normalise(x, mean, rstd, scale, offset, residual if case.residual else None, case.relu)
        kept = y if case.relu else None
        norms.backward_sums(given, x, kept, mean, rstd, sums[0], sums[1], case.relu, space)
        dx, d_residual = norms.backward_inputs(
            given, x, kept, mean, rstd, scale, sums[0], sums[1], case.relu, case.residual
        )
        return [y, dx, *sums, *([] if d_residual is None else [d_residual]), *(moved if case.running else ())]

    expected = torch.autograd.grad(out, leaves, torch.stack(given).double().sum(0))
    wanted = [out.detach(), *expected, *(moved_so_far if case.running else ())]
    _compare("BatchNorm", repeated("BatchNorm", run, interpreted), wanted, TOLERANCES[dtype].kernel)


@dataclass(frozen=True)
class ConvolutionCase:
    """A convolution to compare.

    Attributes:
        geometry: the sizes.
        tiles: other tiles than those of the geometry.
        forward, inputs, filters: whether to compute the outputs and either gradient.
        bias: whether there is a bias.
        statistics: whether the mean and rstd of the outputs come with them.
        running: whether these move running statistics.
    """

    geometry: Geometry
    tiles: Tiles | None = None
    forward: bool = True
    inputs: bool = True
    filters: bool = True
    bias: bool = False
    statistics: bool = True
    running: bool = True


def check_convolution(case: ConvolutionCase, device: torch.device, dtype: torch.dtype, interpreted: int = 2) -> None:
    """Compare a convolution with torch's, forward and backward, on values of bfloat16 or float32; see `repeated`.

    Raises KernelError if they differ. Blocks the host.
    """
    from crossbow_py.engine.kernels import convolution as kernels  # noqa: PLC0415  likewise
    from crossbow_py.engine.kernels.statistics import Statistics  # noqa: PLC0415  likewise

    g, generator = case.geometry, torch.Generator(device).manual_seed(0)

    def images(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
        return values.contiguous(memory_format=torch.channels_last)

    inputs, filters = images(g.batch, g.groups * g.in_channels, g.height, g.width), images(
        g.groups * g.out_channels, g.in_channels, *g.kernel)  # fmt: skip
    given = images(g.batch, g.groups * g.out_channels, *g.out_size)
    bias = torch.randn(len(filters), generator=generator, device=device).to(dtype) if case.bias else None
    space = kernels.statistics_workspace(g, device, case.tiles)
    own = kernels.backward_workspace(g, device, case.tiles)

    def outputs() -> list[Tensor]:
        moved = [torch.ones(len(filters), device=device) for _ in range(2)]
        mean, variance = moved if case.running else (None, None)
        statistics = Statistics(mean, variance, 0.1, 1e-5) if case.statistics else None
        y, moments = kernels.forward(inputs, filters, bias, g, statistics, space, case.tiles)
        return [y, *(moments or ()), *(moved if case.statistics and case.running else ())]

    def gradients() -> list[Tensor]:
        d_filters = torch.empty_like(filters, dtype=torch.float32) if case.filters else None
        d_inputs = kernels.backward(
            given, inputs, filters, g, input_gradient=case.inputs, filter_gradient=d_filters, workspace=own,
            tiles=case.tiles,
        )  # fmt: skip
        return [each for each in (d_inputs, d_filters) if each is not None]

    found = repeated("convolution", outputs, interpreted) if case.forward else []
    asked = case.inputs or case.filters
    found_of_gradients = repeated("convolution's gradients", gradients, interpreted) if asked else []
    if not launches_run():
        return  # a CPU takes seconds for the reference
    leaves = [inputs.double().requires_grad_(), filters.double().requires_grad_()]
    shift = None if bias is None else bias.double()
    out = nn.functional.conv2d(leaves[0], leaves[1], shift, g.stride, g.padding, g.dilation, g.groups)
    both = torch.autograd.grad(out, leaves, given.double())
    tolerance = EXACT_PRODUCTS if dtype == torch.float32 and not uses_tf32() else TOLERANCES[dtype].kernel
    _compare("convolution", found, [out.detach(), *_moments(out.detach())][: len(found)], tolerance)
    expected = [each for each, is_asked in zip(both, (case.inputs, case.filters), strict=True) if is_asked]
    _compare("convolution's gradients", found_of_gradients, expected, tolerance)


def _moments(out: Tensor) -> list[Tensor]:
    """Return the mean and rstd of outputs, and running statistics that were ones."""
    means, variances = out.mean((0, 2, 3)), out.var((0, 2, 3))
    scale = (out.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    return [means, scale, 0.9 + 0.1 * means, 0.9 + 0.1 * variances]


def _compare(name: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    agree = all(is_within(*pair, tolerance) for pair in zip(found, expected, strict=True))
    require(agree, f"the kernels of {name} give other numbers than torch's operators")
