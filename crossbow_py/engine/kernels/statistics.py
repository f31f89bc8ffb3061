"""Mean and variance of columns, computed by the kernel that makes the columns, without another pass over memory.

A kernel whose programs each hold a tile of rows (such as the accumulator of a convolution) ends with
`finish_statistics`. A program stores its tile's mean and sum of squared deviations, and takes a ticket; the program
with the last ticket of its columns combines all tiles in order, so the bits do not depend on which one was last.

Deviations are from the tile's own mean, and parts a and b of n_a and n_b rows are combined (Chan, Golub, LeVeque:
"Updating formulae and a pairwise algorithm for computing sample variances", 1979) by

    δ = m_b − m_a,  n = n_a + n_b,  m = m_a + δ·n_b/n,  S = S_a + S_b + δ²·n_a·n_b/n

A plain sum of squares would lose the variance of columns with a large mean.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels become pointers and tiles when Triton compiles them, for which Python has no types.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """A norm's running mean and variance `[N]`, which are updated in place, or None; its momentum and ε."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float


@dataclass(frozen=True)
class Workspace:
    """Memory through which the programs of one launch exchange results; made once, outside of graphs.

    Launches that use it must follow each other on one stream. Kernels that split their work equally may share it.

    Attributes:
        partials: `[tiles, 2, N]`, float32, or float64 for float64 values; for gradients of filters
            `[splits, G, O, KH·KW·C]`, float32.
        counters: `[column blocks]` or `[tiles]`, int32; zero before and after every launch.
    """

    partials: Tensor
    counters: Tensor

    @classmethod
    def of_tiles(
        cls, num_tiles: int, column_blocks: int, N: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Workspace:
        """Return a workspace for a launch of `num_tiles` tiles in each of `column_blocks` blocks of N columns."""
        partials = torch.empty(num_tiles, 2, N, dtype=dtype, device=device)
        return cls(partials, torch.zeros(column_blocks, dtype=torch.int32, device=device))


# Below, `columns` are the indices of a tile's columns, and `column_mask` says which exist; tile t holds the rows from
# t * rows_per_tile to those of the next tile or to M. Reductions are over axis 0, the rows.


@triton.jit
def merge(count, mean, squares, other_count, other_mean, other_squares):
    """Combine two parts by Chan's formula, element by element. Counts are floats, and either or both may be zero."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    delta = other_mean - mean
    return total, mean + delta * share, squares + other_squares + delta * delta * (count * share)


@triton.jit
def pool(count, mean, squares, total):
    """Combine all rows by Chan's formula: `[R, 1]`, `[R, C]`, `[R, C]` and the sum of counts give two `[C]`."""
    pooled = tl.sum(count * mean, axis=0) / total
    delta = mean - pooled[None, :]
    return pooled, tl.sum(squares + count * delta * delta, axis=0)


@triton.jit
def hand_in(first, second, columns, column_mask, tile_index, num_tiles, N, partials, counter):
    """Store a tile's two `[C]` for the last program of these columns, and return whether that is this one."""
    row = partials + tile_index * 2 * N + columns
    tl.store(row, first, mask=column_mask)
    tl.store(row + N, second, mask=column_mask)
    # Every thread's stores come before the ticket, which one thread takes: the barrier orders them within the program,
    # the ticket's release among programs. Its acquire, and a barrier of the compiler's, come before the last's loads.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_tiles - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def load_partials(partials, tiles, columns, column_mask, num_tiles, N):
    """Load the partial results of tiles `[R]`: two `[R, C]`, zeros for missing tiles. L1 may be stale: bypass it."""
    at = partials + tiles[:, None] * 2 * N + columns[None, :]
    mask = (tiles < num_tiles)[:, None] & column_mask[None, :]
    first = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return first, tl.load(at + N, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def publish_moments(
    average, squares, columns, column_mask, tile_index, num_tiles, rows_per_tile, M, N, partials, counter,
    mean, rstd, running_mean, running_var, MOMENTUM: tl.constexpr, EPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Do `finish_statistics` for a program with the mean and the squared deviations of its tile, two `[C]`."""
    if hand_in(average, squares, columns, column_mask, tile_index, num_tiles, N, partials, counter):
        dtype: tl.constexpr = partials.dtype.element_ty
        # LANES tiles are read at once, and each lane keeps its own moments until the end: one reduction for all.
        lanes = tl.arange(0, LANES)
        count = tl.zeros((LANES, 1), dtype)
        lane_mean = tl.zeros((LANES, columns.shape[0]), dtype)
        lane_squares = tl.zeros((LANES, columns.shape[0]), dtype)
        for first in range(0, num_tiles, LANES):
            tiles = first + lanes
            tile_mean, tile_squares = load_partials(partials, tiles, columns, column_mask, num_tiles, N)
            rows = tl.minimum(tl.maximum(M - tiles * rows_per_tile, 0), rows_per_tile).to(dtype)
            count, lane_mean, lane_squares = merge(
                count, lane_mean, lane_squares, rows[:, None], tile_mean, tile_squares
            )
        pooled, total_squares = pool(count, lane_mean, lane_squares, M)
        tl.store(mean + columns, pooled, mask=column_mask)
        tl.store(rstd + columns, 1.0 / tl.sqrt(total_squares / M + EPS), mask=column_mask)
        if running_mean is not None:
            old_mean = tl.load(running_mean + columns, mask=column_mask, other=0.0)
            old_var = tl.load(running_var + columns, mask=column_mask, other=0.0)
            new_mean = (1.0 - MOMENTUM) * old_mean + MOMENTUM * pooled
            new_var = (1.0 - MOMENTUM) * old_var + MOMENTUM * (total_squares / (M - 1))
            tl.store(running_mean + columns, new_mean, mask=column_mask)
            tl.store(running_var + columns, new_var, mask=column_mask)


@triton.jit
def finish_statistics(
    tile, row_mask, columns, column_mask, tile_index, num_tiles, rows_per_tile, M, N, partials, counter,
    mean, rstd, running_mean, running_var, MOMENTUM: tl.constexpr, EPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the columns' statistics at the end of a kernel whose programs hold tiles `[R, C]` of a matrix [M, N].

    `counter` points to the counter of these columns, which `num_tiles` programs count up. The last of them writes mean
    and rstd = 1/√(S/M + EPS) and, unless they are None, updates running_mean and running_var in place, with S/(M − 1),
    as running ← (1 − MOMENTUM)·running + MOMENTUM·new. LANES, a power of two, is how many tiles it reads at once.
    """
    present = row_mask[:, None]
    values = tl.where(present, tile.to(partials.dtype.element_ty), 0.0)
    average = tl.sum(values, axis=0) / tl.minimum(M - tile_index * rows_per_tile, rows_per_tile)
    deviations = tl.where(present, values - average[None, :], 0.0)
    squares = tl.sum(deviations * deviations, axis=0)
    publish_moments(
        average, squares, columns, column_mask, tile_index, num_tiles, rows_per_tile, M, N, partials, counter,
        mean, rstd, running_mean, running_var, MOMENTUM, EPS, LANES,
    )  # fmt: skip
