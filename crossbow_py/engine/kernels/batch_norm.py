"""BatchNorm in training mode with a residual sum and ReLU, forward and backward, for all learners at once.

    x̂ = (x − mean)·rstd,  y = max(0, x̂·weight + bias + residual)

Activations are matrices [M, N] of bfloat16, float32 or float64: M pixels of a channels-last image, and in the N columns
the channels of K learners side by side. Columns are independent, so K learners are one wide layer. Values of columns
are `[N]` and float32, like all arithmetic; with float64 matrices both are float64.

Each function enqueues one kernel on the current stream and does not block the host. Sums over rows are made in tiles,
in an order that depends only on the shape: the same values give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels become pointers and tiles when Triton compiles them, for which Python has no types.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossbow_py.core.triton_launch import launch
from crossbow_py.engine.kernels.statistics import Workspace, hand_in, load_partials, merge, pool, publish_moments

# Values of a tile for programs that sum over rows, and for others; half as many in float64, because of registers.
_SUMMED_VALUES, _MAPPED_VALUES = 4096, 2048
_SUMMED_WARPS, _MAPPED_WARPS = 8, 4
# Narrow, as the last program of each block of columns reads all its tiles, so more blocks with fewer tiles are better;
# and as narrow for 2 learners as for 16, so that one more learner compiles nothing. 32 columns of bfloat16 are still
# whole sectors of memory.
_FEWEST_COLUMNS, _MOST_COLUMNS = 16, 32
# The most programs that sum over rows: about four for each multiprocessor of a large GPU.
_SUMMING_PROGRAMS = 512


@dataclass(frozen=True)
class _Split:
    """The division of a matrix among programs that sum over rows; `rows_per_tile` is a multiple of `block_rows`."""

    block_rows: int
    block_columns: int
    column_blocks: int
    rows_per_tile: int
    num_tiles: int


def _blocks(N: int, values: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the rows and columns of a block, powers of two."""
    columns = min(max(triton.next_power_of_2(N), _FEWEST_COLUMNS), _MOST_COLUMNS)
    return (values // 2 if dtype == torch.float64 else values) // columns, columns


def _split(M: int, N: int, dtype: torch.dtype) -> _Split:
    block_rows, block_columns = _blocks(N, _SUMMED_VALUES, dtype)
    column_blocks = triton.cdiv(N, block_columns)
    most_tiles = max(_SUMMING_PROGRAMS // column_blocks, 1)
    rows_per_tile = block_rows * triton.cdiv(triton.cdiv(M, block_rows), most_tiles)
    return _Split(block_rows, block_columns, column_blocks, rows_per_tile, triton.cdiv(M, rows_per_tile))


def workspace_for(M: int, N: int, dtype: torch.dtype, device: torch.device) -> Workspace:
    """Return the workspace that `statistics` and `backward_sums` of a matrix [M, N] of `dtype` use in turn."""
    split = _split(M, N, dtype)
    return Workspace.of_tiles(split.num_tiles, split.column_blocks, N, device, _arithmetic(dtype))


def statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """Return mean and rstd = 1/√(biased variance + eps) of the columns of x [M, N], M ≥ 2: two `[N]`.

    Running statistics `[N]` are updated in place, running ← (1 − momentum)·running + momentum·new, with the unbiased
    variance; both may be None. A kernel is compiled for every momentum and eps.
    """
    M, N = _shape(x)
    split = _split_in(workspace, x)
    mean, rstd = (torch.empty(N, dtype=_arithmetic(x.dtype), device=x.device) for _ in range(2))
    launch(
        _statistics_kernel, (split.num_tiles * split.column_blocks,),
        x, workspace.partials, workspace.counters, mean, rstd, running_mean, running_var,
        M, N, split.num_tiles, split.rows_per_tile,
        MOMENTUM=momentum, EPS=eps, ROWS=split.block_rows, COLUMNS=split.block_columns, num_warps=_SUMMED_WARPS,
    )  # fmt: skip
    return mean, rstd


def normalise(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Return y = max(0, (x − mean)·rstd·weight + bias + residual) in x's dtype, [M, N]; NaN stays NaN."""
    M, N = _shape(x, residual)
    rows, columns = _blocks(N, _MAPPED_VALUES, x.dtype)
    y = torch.empty_like(x)
    launch(
        _normalise_kernel, (triton.cdiv(M, rows) * triton.cdiv(N, columns),),
        x, residual, y, mean, rstd, weight, bias, M, N,
        RELU=relu, ROWS=rows, COLUMNS=columns, num_warps=_MAPPED_WARPS,
    )  # fmt: skip
    return y


def backward_sums(
    gradients: list[Tensor],
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    relu: bool,
    workspace: Workspace,
) -> None:
    """Set d_bias ← Σ g and d_weight ← Σ g·x̂ over the rows, with g the sum of `gradients` where y > 0, else 0.

    Args:
        gradients: the gradients of y from its one or two users, [M, N] each; their sum is never written to memory.
        x: the input of `normalise`, [M, N].
        y: its output; not read, and may be None, without `relu`.
        mean, rstd: from `statistics`, `[N]`.
        d_weight, d_bias: the results, `[N]`.
        relu: whether y is the output of a ReLU.
        workspace: for x's shape.
    """
    M, N = _shape(x, *gradients, y)
    split = _split_in(workspace, x)
    first, second = _one_or_two(gradients)
    launch(
        _backward_sums_kernel, (split.num_tiles * split.column_blocks,),
        first, second, x, y if relu else None, workspace.partials, workspace.counters, mean, rstd, d_weight, d_bias,
        M, N, split.num_tiles, split.rows_per_tile,
        ROWS=split.block_rows, COLUMNS=split.block_columns, num_warps=_SUMMED_WARPS,
    )  # fmt: skip


def backward_inputs(
    gradients: list[Tensor],
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
    relu: bool,
    with_residual: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and, `with_residual`, of the residual, which is g; [M, N] in x's dtype.

    dx = weight·rstd·(g − d_bias/M − x̂·d_weight/M), with g and the arguments as in `backward_sums`, which comes before.
    """
    M, N = _shape(x, *gradients, y)
    rows, columns = _blocks(N, _MAPPED_VALUES, x.dtype)
    first, second = _one_or_two(gradients)
    dx, d_residual = torch.empty_like(x), torch.empty_like(x) if with_residual else None
    launch(
        _backward_inputs_kernel, (triton.cdiv(M, rows) * triton.cdiv(N, columns),),
        first, second, x, y if relu else None, dx, d_residual, mean, rstd, weight, d_weight, d_bias, M, N,
        ROWS=rows, COLUMNS=columns, num_warps=_MAPPED_WARPS,
    )  # fmt: skip
    return dx, d_residual


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shape(x: Tensor, *others: Tensor | None) -> tuple[int, int]:
    M, N = x.shape
    for matrix in (x, *others):
        if matrix is not None:
            assert matrix.shape == x.shape, f"a matrix {tuple(matrix.shape)} beside {tuple(x.shape)}"
            assert matrix.is_contiguous(), "a matrix whose rows do not follow each other"
    return M, N


def _split_in(workspace: Workspace, x: Tensor) -> _Split:
    M, N = x.shape
    assert M >= 2, "one row has no unbiased variance"
    split = _split(M, N, x.dtype)
    made_for = (*workspace.partials.shape, *workspace.counters.shape, workspace.partials.dtype)
    needed = (split.num_tiles, 2, N, split.column_blocks, _arithmetic(x.dtype))
    assert made_for == needed, f"a workspace for {made_for}, but a matrix that needs {needed}"
    return split


def _one_or_two(gradients: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    assert len(gradients) in (1, 2), f"{len(gradients)} gradients"
    return gradients[0], gradients[1] if len(gradients) == 2 else None


# A program's block of columns, and the block of rows or the tile. Neighbours in memory are neighbours in time.
@triton.jit
def _place(N, COLUMNS: tl.constexpr):
    column_blocks = tl.cdiv(N, COLUMNS)
    block = tl.program_id(0) % column_blocks
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    return block, tl.program_id(0) // column_blocks, columns, columns < N


# Where rows from `first` lie, and which of them exist. A matrix may have more values than an int32 counts.
@triton.jit
def _rows(first, M, N, columns, column_mask, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    present = first + rows < M
    at = first.to(tl.int64) * N + (rows[:, None] * N + columns[None, :])
    return at, present, present[:, None] & column_mask[None, :]


# The gradient before ReLU. Where y is NaN it passes, as in torch: the learner's gate must see it.
@triton.jit
def _gradient(first, second, y, at, mask, dtype: tl.constexpr):
    gradient = tl.load(first + at, mask=mask, other=0.0).to(dtype)
    if second is not None:
        gradient += tl.load(second + at, mask=mask, other=0.0).to(dtype)
    if y is not None:
        gradient = tl.where(tl.load(y + at, mask=mask, other=0.0) <= 0.0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=["num_tiles", "rows_per_tile"])
def _statistics_kernel(
    x, partials, counters, mean, rstd, running_mean, running_var, M, N, num_tiles, rows_per_tile,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = mean.dtype.element_ty
    block, tile, columns, column_mask = _place(N, COLUMNS)
    # Each place of the block keeps its own moments, and they are combined once.
    count = tl.zeros((ROWS, 1), dtype)
    place_mean = tl.zeros((ROWS, COLUMNS), dtype)
    squares = tl.zeros((ROWS, COLUMNS), dtype)
    for row in range(0, rows_per_tile, ROWS):
        at, present, mask = _rows(tile * rows_per_tile + row, M, N, columns, column_mask, ROWS)
        values = tl.load(x + at, mask=mask, other=0.0).to(dtype)
        count, place_mean, squares = merge(count, place_mean, squares, present[:, None].to(dtype), values, 0.0)
    average, deviations = pool(count, place_mean, squares, tl.minimum(M - tile * rows_per_tile, rows_per_tile))
    publish_moments(
        average, deviations, columns, column_mask, tile, num_tiles, rows_per_tile, M, N, partials, counters + block,
        mean, rstd, running_mean, running_var, MOMENTUM, EPS, ROWS,
    )  # fmt: skip


@triton.jit
def _normalise_kernel(
    x, residual, y, mean, rstd, weight, bias, M, N, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    dtype: tl.constexpr = mean.dtype.element_ty
    _, block, columns, column_mask = _place(N, COLUMNS)
    at, _, mask = _rows(block * ROWS, M, N, columns, column_mask, ROWS)
    centre = tl.load(mean + columns, mask=column_mask, other=0.0)
    inverse = tl.load(rstd + columns, mask=column_mask, other=0.0)
    scale = tl.load(weight + columns, mask=column_mask, other=0.0) * inverse
    shift = tl.load(bias + columns, mask=column_mask, other=0.0)
    value = (tl.load(x + at, mask=mask, other=0.0).to(dtype) - centre[None, :]) * scale[None, :] + shift[None, :]
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0).to(dtype)
    if RELU:
        # Not a maximum, which would turn NaN into 0.
        value = tl.where(value < 0.0, 0.0, value)
    tl.store(y + at, value, mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "rows_per_tile"])
def _backward_sums_kernel(
    first, second, x, y, partials, counters, mean, rstd, d_weight, d_bias, M, N, num_tiles, rows_per_tile,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = mean.dtype.element_ty
    block, tile, columns, column_mask = _place(N, COLUMNS)
    centre = tl.load(mean + columns, mask=column_mask, other=0.0)
    plain = tl.zeros((ROWS, COLUMNS), dtype)
    weighted = tl.zeros((ROWS, COLUMNS), dtype)
    for row in range(0, rows_per_tile, ROWS):
        at, _, mask = _rows(tile * rows_per_tile + row, M, N, columns, column_mask, ROWS)
        gradient = _gradient(first, second, y, at, mask, dtype)
        plain += gradient
        weighted += gradient * (tl.load(x + at, mask=mask, other=0.0).to(dtype) - centre[None, :])
    plain, weighted = tl.sum(plain, axis=0), tl.sum(weighted, axis=0)
    if hand_in(plain, weighted, columns, column_mask, tile, num_tiles, N, partials, counters + block):
        plain_lanes = tl.zeros((ROWS, COLUMNS), dtype)
        weighted_lanes = tl.zeros((ROWS, COLUMNS), dtype)
        for from_tile in range(0, num_tiles, ROWS):
            tiles = from_tile + tl.arange(0, ROWS)
            some_plain, some_weighted = load_partials(partials, tiles, columns, column_mask, num_tiles, N)
            plain_lanes += some_plain
            weighted_lanes += some_weighted
        scale = tl.load(rstd + columns, mask=column_mask, other=0.0)
        tl.store(d_bias + columns, tl.sum(plain_lanes, axis=0), mask=column_mask)
        tl.store(d_weight + columns, tl.sum(weighted_lanes, axis=0) * scale, mask=column_mask)


@triton.jit
def _backward_inputs_kernel(
    first, second, x, y, dx, d_residual, mean, rstd, weight, d_weight, d_bias, M, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = mean.dtype.element_ty
    _, block, columns, column_mask = _place(N, COLUMNS)
    at, _, mask = _rows(block * ROWS, M, N, columns, column_mask, ROWS)
    centre = tl.load(mean + columns, mask=column_mask, other=0.0)
    inverse = tl.load(rstd + columns, mask=column_mask, other=0.0)
    scale = tl.load(weight + columns, mask=column_mask, other=0.0) * inverse
    slope = tl.load(d_weight + columns, mask=column_mask, other=0.0) * inverse / M
    offset = tl.load(d_bias + columns, mask=column_mask, other=0.0) / M
    gradient = _gradient(first, second, y, at, mask, dtype)
    deviation = tl.load(x + at, mask=mask, other=0.0).to(dtype) - centre[None, :]
    tl.store(dx + at, scale[None, :] * (gradient - offset[None, :] - deviation * slope[None, :]), mask=mask)
    if d_residual is not None:
        tl.store(d_residual + at, gradient, mask=mask)
