"""Checks of families of kernels on a device: Triton is there, they compile, and they agree with torch's operators."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from crossbow_py.core.triton_launch import KernelError, check_size, compiles, repeated, unavailable
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.trust import why_not

Family = Literal["layers", "loss", "batches"]

# By device. What runs in the interpreter is as small as several programs with several tiles allow.
_ROWS, _BATCH = (20_011, 301), (64, 4)
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-2, torch.bfloat16: 5e-2}  # TF32 has 10 bits, bfloat16 8


def serves(family: Family, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None if a family may be used for values of `dtype`, else a message for the user.

    It may be used if the device and the environment allow it (`engine/trust.py`). The first call for a device and dtype
    compiles and compares, which blocks the host.
    """
    reason = why_not(family, device) or unavailable(device)
    reason = reason or (_failure(family, device, dtype) if dtype in _TOLERANCE else f"there are no kernels for {dtype}")
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
        _check_norm(device, dtype)
        if dtype != torch.float64 and why_not("convolutions", device) is None:
            _check_convolution(device, dtype)
    else:
        {"batches": image_kernels, "loss": cross_entropy}[family].check(device, dtype)


def _check_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Compare a norm, a sum and a ReLU, forward and backward, over many tiles of rows and two blocks of columns."""
    from crossbow_py.engine.kernels import batch_norm as norms  # noqa: PLC0415  likewise

    rows, columns, generator = check_size(*_ROWS), 37, torch.Generator(device).manual_seed(0)
    x, residual, given = (
        torch.randn(rows, columns, generator=generator, device=device).to(dtype) for _ in range(3)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale, offset = (torch.rand(columns, generator=generator, device=device).to(wide) + 0.5 for _ in range(2))
    leaves = [value.double().requires_grad_() for value in (x, residual, scale, offset)]
    mean_so_far, variance_so_far = (torch.ones(columns, dtype=torch.float64, device=device) for _ in range(2))
    normal = nn.functional.batch_norm(
        leaves[0], mean_so_far, variance_so_far, leaves[2], leaves[3], training=True, momentum=0.1, eps=1e-5
    )
    out = (normal + leaves[1]).relu()
    # Gradients are left out where rounding decides on which side of zero the sum is.
    given = given * ((normal + leaves[1]).detach().abs() > _TOLERANCE[dtype])
    space = norms.workspace_for(rows, columns, dtype, device)

    def run() -> list[Tensor]:
        moved, sums = (
            [make(columns, dtype=wide, device=device) for _ in range(2)] for make in (torch.ones, torch.zeros)
        )
        mean, rstd = norms.statistics(x, moved[0], moved[1], 0.1, 1e-5, space)
        y = norms.normalise(x, mean, rstd, scale, offset, residual)
        norms.backward_sums([given], x, y, mean, rstd, sums[0], sums[1], True, space)
        dx, d_residual = norms.backward_inputs([given], x, y, mean, rstd, scale, sums[0], sums[1], True, True)
        assert d_residual is not None, "it was asked for"
        return [y, dx, d_residual, *sums, *moved]

    expected = torch.autograd.grad(out, leaves, given.double())
    wanted = [out.detach(), *expected, mean_so_far, variance_so_far]
    _compare("BatchNorm", repeated("BatchNorm", run), wanted, _TOLERANCE[dtype])


def _check_convolution(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the statistics that come with outputs, and both gradients of one launch, with a split depth.

    Convolutions with a layer's own sizes are compared when their ways are measured.
    """
    from crossbow_py.engine.kernels import convolution as kernels  # noqa: PLC0415  likewise
    from crossbow_py.engine.kernels.statistics import Statistics  # noqa: PLC0415  likewise

    g = Geometry(check_size(*_BATCH), 2, 5, 7, 11, 12, (3, 3), stride=(2, 1), padding=(1, 1))
    generator = torch.Generator(device).manual_seed(0)

    def images(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
        return values.contiguous(memory_format=torch.channels_last)

    inputs, filters = images(g.batch, 2 * 5, g.height, g.width), images(2 * 7, 5, 3, 3)
    given = images(g.batch, 2 * 7, *g.out_size)
    space, own = kernels.statistics_workspace(g, device), kernels.backward_workspace(g, device)

    def run() -> list[Tensor]:
        moved = [torch.ones(len(filters), device=device) for _ in range(2)]
        y, moments = kernels.forward(inputs, filters, None, g, Statistics(moved[0], moved[1], 0.1, 1e-5), space)
        d_filters = torch.empty_like(filters, dtype=torch.float32)
        d_inputs = kernels.backward(
            given, inputs, filters, g, input_gradient=True, filter_gradient=d_filters, workspace=own
        )
        assert moments is not None and d_inputs is not None, "they were asked for"  # noqa: PT018
        return [y, d_inputs, d_filters, *moments, *moved]

    leaves = [inputs.double().requires_grad_(), filters.double().requires_grad_()]
    out = nn.functional.conv2d(leaves[0], leaves[1], None, g.stride, g.padding, g.dilation, g.groups)
    gradients = torch.autograd.grad(out, leaves, given.double())
    out = out.detach()
    means, variances = out.mean((0, 2, 3)), out.var((0, 2, 3))
    scale = (out.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    expected = [out, *gradients, means, scale, 0.9 + 0.1 * means, 0.9 + 0.1 * variances]
    _compare("convolution", repeated("convolution", run), expected, _TOLERANCE[dtype])


def _compare(name: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if not bool((ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()):
            raise KernelError(f"the kernels of {name} give other numbers than torch's operators")
