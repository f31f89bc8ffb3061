"""The update of all learners in one pass over their rows: gate, clipping, optimizer step, pull, averaging and shadow.

A round takes three launches for any number of learners and parameters:

    squares    the sum of squares of every learner's gradient, tile by tile
    prepare    one program for each learner: its gate, the scale of its gradient, its coefficients; counts its step
    update     reads w, g and u once and writes w, u and the shadow once; z and z_prev once for all K

In bytes, float32 rows with a bfloat16 shadow, SGD with momentum: (12 + 8 + 2)·K·P + 16·P for `update`, 4·K·P for
`squares`. Equations: averaging/sma.py and engine/update/optimizers.py. Rows are a bank's in `blocks`
(engine/bank/layout.py); a tile is a piece of one parameter, and its program goes through the learners in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels become pointers and tiles when Triton compiles them, for which Python has no types.
from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossbow_py.core.triton_launch import launch

TILE = tl.constexpr(1024)  # values of a parameter that a program updates
_WIDTH = tl.constexpr(4)  # columns of the tile table
SETTINGS = 8  # float64 settings of a learner; see `sgd_settings` and `adamw_settings`
VALUES = tl.constexpr(16)  # values of a learner in a round; see `_prepare`
_SETTINGS = tl.constexpr(SETTINGS)
_LEARNERS_A_TURN = tl.constexpr(1024)

SGD, ADAMW = 0, 1


def make_tiles(blocks: Sequence[tuple[int, int, int, bool]], device: torch.device) -> Tensor:
    """Return the tiles of blocks `(offset in the bank, offset in z, values of a row, whether weight decay applies)`.

    They are int64 [T, 4]: the offset of the parameter's block in the bank, that of its block in z, the length of a row,
    and 4 times the tile's index in the row, plus 1 if weight decay applies, plus 2 if rows begin at multiples of 4
    values.
    """
    rows = [
        (bank, z, numel, 4 * place + decays + 2 * (numel % 4 == 0 and bank % 4 == 0))
        for bank, z, numel, decays in blocks
        for place in range(-(-numel // TILE.value))
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, _WIDTH.value)


def sgd_settings(momentum: float, weight_decay: float, nesterov: bool, clip_norm: float | None) -> list[float]:
    """Return a learner's row of settings for SGD."""
    limit = math.inf if clip_norm is None else clip_norm
    return [momentum, weight_decay, float(nesterov), 0.0, 0.0, 0.0, 0.0, limit]


def adamw_settings(
    beta1: float, beta2: float, epsilon: float, weight_decay: float, clip_norm: float | None
) -> list[float]:
    """Return a learner's row of settings for AdamW."""
    return [beta1, weight_decay, beta2, epsilon, 0.0, 0.0, 0.0, math.inf if clip_norm is None else clip_norm]


@dataclass(frozen=True)
class RowsToUpdate:
    """The 1-dim storages of a bank of K rows in `blocks`, and of z with one row; float32 or float64.

    `state` has one or two; `shadow` is bfloat16 or None; `total` takes the sum of corrections, or is None.
    """

    weights: Tensor
    gradients: Tensor
    state: tuple[Tensor, ...]
    shadow: Tensor | None
    z: Tensor
    z_prev: Tensor
    total: Tensor | None


def squares(gradients: Tensor, tiles: Tensor, num_learners: int, out: Tensor) -> None:
    """Write the sum of squares of each tile of each learner's gradient to `out` [T, K], in float64."""
    launch(_squares, (len(tiles),), gradients, tiles, out, num_learners)


def prepare(
    partial_squares: Tensor,
    settings: Tensor,
    results: Tensor,
    learning_rates: Tensor,
    step_counts: Tensor,
    values: Tensor,
    num_learners: int,
    optimizer: int,
    *,
    loss_column: int,
    finite_column: int,
) -> None:
    """Compute each learner's gate and coefficients, and count the step of learners whose gate is open.

    Args:
        partial_squares: float64 [T, K], from `squares`.
        settings: float64 [K, 8].
        results: float64 [>= K, columns], from which the loss is read, and to which 1 or 0 is written for an open or
            closed gate.
        learning_rates: float64 [>= K].
        step_counts: float64 [>= K], the steps so far.
        values: [K, 16] in the rows' dtype, the result.
        num_learners: K.
        optimizer: SGD or ADAMW.
        loss_column, finite_column: columns of `results`.
    """
    launch(
        _prepare, (num_learners,), partial_squares, partial_squares.shape[0], num_learners, settings,
        results, results.stride(0), loss_column, finite_column, learning_rates, step_counts, values,
        ADAMW=optimizer == ADAMW,
    )  # fmt: skip


def update(
    rows: RowsToUpdate,
    tiles: Tensor,
    values: Tensor,
    num_learners: int,
    optimizer: int,
    *,
    correction: float | None,
    momentum: float | None,
    share: float,
    follows: bool,
    total_squares: Tensor,
) -> None:
    """Update all rows in one pass. Rows whose gate is closed do not change by a bit, and add nothing to the sum.

    Args:
        rows: the storages to read and write.
        tiles: the tiles of the rows.
        values: from `prepare`.
        num_learners: K.
        optimizer: SGD or ADAMW.
        correction: α; None in a round that does not average.
        momentum: μ, to move z in the same pass; None to leave the sum in `rows.total`.
        share: the factor of the sum, if z moves.
        follows: whether the sum is that of new weights' distances from z, not of corrections.
        total_squares: float64 [T], the sum of squares in each tile of the sum by which z moves.
    """
    averages, moves = correction is not None, correction is not None and momentum is not None
    state = rows.state or (rows.weights,)
    launch(
        _update, (len(tiles),),
        rows.weights, rows.gradients, state[0], state[-1], rows.weights if rows.shadow is None else rows.shadow,
        rows.z, rows.z_prev, rows.z if rows.total is None else rows.total, tiles, values, total_squares,
        num_learners, *two_floats(correction or 0.0), *two_floats(momentum or 0.0), *two_floats(share),
        ADAMW=optimizer == ADAMW, STATES=len(rows.state), SHADOW=rows.shadow is not None, AVERAGES=averages,
        FOLLOWS=follows, MOVES=moves, KEEPS_TOTAL=averages and rows.total is not None, num_warps=8,
    )  # fmt: skip


def move(z: Tensor, z_prev: Tensor, total: Tensor, momentum: float) -> None:
    """Set z' = z + total + μ·(z − z_prev), z_prev ← z, on three vectors of one shape.

    The result equals that of `AveragingRule.average` bit for bit, as ranks with kernels and ranks with torch's
    operators must have the same z.
    """
    grid = (triton.cdiv(z.numel(), TILE.value),)
    launch(_move, grid, z, z_prev, total, z.numel(), *three_floats(momentum), enable_fp_fusion=False)


def two_floats(value: float) -> tuple[float, float]:
    """Return a number as a float32 and the rest: kernels take float32, and float64 rows need all digits."""
    (high,) = struct.unpack("f", struct.pack("f", value))
    return high, value - high


def three_floats(value: float) -> tuple[float, float, float]:
    """Return a number as three float32, which hold all 53 binary digits; two hold 48."""
    high, low = two_floats(value)
    return high, *two_floats(low)


# One program for each tile: out[t, j] <- the sum of squares.
@triton.jit(do_not_specialize=["num_learners"])
def _squares(gradients, tiles, out, num_learners):
    tile = tl.program_id(0)
    base, numel = tl.load(tiles + tile * _WIDTH), tl.load(tiles + tile * _WIDTH + 2)
    at = (tl.load(tiles + tile * _WIDTH + 3) // 4) * TILE + tl.arange(0, TILE)
    for learner in range(num_learners):
        values = tl.load(gradients + base + learner * numel + at, mask=at < numel, other=0.0)
        # float32 within a tile, as in a norm by torch; float64 over tiles.
        tl.store(out + tile * num_learners + learner, tl.sum(values * values, axis=0).to(tl.float64))


# values[j] <- open, scale, then for SGD momentum, decay, Nesterov, learning rate; for AdamW what `_adamw` names.
@triton.jit(do_not_specialize=["num_learners"])
def _prepare(partials, num_tiles, num_learners, settings, results, stride, loss_column, finite_column, rates, counts,
             values, ADAMW: tl.constexpr):
    learner = tl.program_id(0)
    sums = tl.zeros((_LEARNERS_A_TURN,), tl.float64)
    for begin in range(0, num_tiles, _LEARNERS_A_TURN):
        tile = begin + tl.arange(0, _LEARNERS_A_TURN)
        sums += tl.load(partials + tile * num_learners + learner, mask=tile < num_tiles, other=0.0)
    norm = tl.sqrt(tl.sum(sums, axis=0))
    own = settings + learner * _SETTINGS
    first, decay, third, fourth = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    limit, loss = tl.load(own + 7), tl.load(results + learner * stride + loss_column)
    largest = 1.7976931348623157e308
    opened = (norm <= largest) & (tl.abs(loss) <= largest)  # false for NaN as well
    clips = opened & (norm > limit)
    scale = tl.where(clips, limit / (tl.where(clips, norm, 1.0) + 1e-6), 1.0)  # as torch clips
    rate = tl.load(rates + learner)
    count = tl.load(counts + learner) + 1.0
    out = values + learner * VALUES
    kind = values.dtype.element_ty
    tl.store(out, opened.to(kind))
    tl.store(out + 1, scale.to(kind))
    if ADAMW:
        # beta^t in float64: 1 - beta2^t has few digits left in float32.
        bias1 = 1.0 - tl.exp(count * tl.log(tl.maximum(first, 1e-300)))
        bias2 = 1.0 - tl.exp(count * tl.log(tl.maximum(third, 1e-300)))
        tl.store(out + 2, (1.0 - first).to(kind))
        tl.store(out + 3, (1.0 - rate * decay).to(kind))
        tl.store(out + 4, third.to(kind))
        tl.store(out + 5, tl.sqrt(bias2).to(kind))
        tl.store(out + 6, (rate / bias1).to(kind))
        tl.store(out + 7, fourth.to(kind))
        tl.store(out + 8, (1.0 - third).to(kind))  # in float32 it would lose digits
    else:
        tl.store(out + 2, first.to(kind))
        tl.store(out + 3, decay.to(kind))
        tl.store(out + 4, third.to(kind))
        tl.store(out + 5, rate.to(kind))
    tl.store(counts + learner, tl.where(opened, count, count - 1.0))
    tl.store(results + learner * stride + finite_column, opened.to(tl.float64))


@triton.jit
def _sgd(weights, gradient, velocity, own, decays, STATES: tl.constexpr):
    momentum, decay, nesterov, rate = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    gradient += weights * tl.where(decays, decay, 0.0)
    step = gradient
    if STATES > 0:
        velocity = velocity * momentum + gradient
        step = tl.where(nesterov != 0, gradient + velocity * momentum, velocity)
    return weights - step * rate, velocity


@triton.jit
def _adamw(weights, gradient, mean, square, own, decays):
    take1, keep, beta2, root = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    rate, epsilon, take2 = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
    mean += (gradient - mean) * take1
    square = square * beta2 + gradient * gradient * take2
    weights = weights * tl.where(decays, keep, 1.0)
    return weights - rate * mean / (tl.sqrt(square) / root + epsilon), mean, square


# The values `at` of one parameter for all learners. ALIGNED: rows begin on 4 values, so four travel at once.
@triton.jit
def _update_tile(w, g, s0, s1, shadow, z, z_prev, total, values, squares_out, base, z_base, numel, at, decays,
                 num_learners, rate, momentum, share, ALIGNED: tl.constexpr, ADAMW: tl.constexpr, STATES: tl.constexpr,
                 SHADOW: tl.constexpr, AVERAGES: tl.constexpr, FOLLOWS: tl.constexpr, MOVES: tl.constexpr,
                 KEEPS_TOTAL: tl.constexpr):
    kind = w.dtype.element_ty
    if ALIGNED:
        # These are multiples of 4; this tells the compiler.
        base, z_base, numel = (base // 4) * 4, (z_base // 4) * 4, (numel // 4) * 4
    inside = at < numel
    centre = tl.zeros(at.shape, kind)
    pulls = tl.zeros(at.shape, kind)
    if AVERAGES:
        centre = tl.load(z + z_base + at, mask=inside, other=0.0)
    for learner in range(num_learners):
        own = values + learner * VALUES
        mine = tl.where(tl.load(own) != 0, inside, False)
        row = base + learner * numel + at
        weights = tl.load(w + row, mask=mine, other=0.0)
        gradient = tl.load(g + row, mask=mine, other=0.0) * tl.load(own + 1)
        pull = (weights - centre) * rate
        if ADAMW:
            mean = tl.load(s0 + row, mask=mine, other=0.0)
            square = tl.load(s1 + row, mask=mine, other=0.0)
            weights, mean, square = _adamw(weights, gradient, mean, square, own, decays)
            tl.store(s0 + row, mean, mask=mine)
            tl.store(s1 + row, square, mask=mine)
        else:
            velocity = gradient
            if STATES > 0:
                velocity = tl.load(s0 + row, mask=mine, other=0.0)
            weights, velocity = _sgd(weights, gradient, velocity, own, decays, STATES)
            if STATES > 0:
                tl.store(s0 + row, velocity, mask=mine)
        if AVERAGES:
            weights -= pull
            if FOLLOWS:
                pull = weights - centre
            pulls += tl.where(mine, pull, 0.0)
        tl.store(w + row, weights, mask=mine)
        if SHADOW:
            tl.store(shadow + row, weights.to(shadow.dtype.element_ty), mask=mine)
    if AVERAGES:
        if MOVES:
            pulls = pulls * share
        pulls_in = tl.where(inside, pulls, 0.0).to(tl.float64)
        tl.store(squares_out, tl.sum(pulls_in * pulls_in, axis=0))
        if KEEPS_TOTAL:
            tl.store(total + z_base + at, pulls, mask=inside)
        if MOVES:
            before = tl.load(z_prev + z_base + at, mask=inside, other=0.0)
            tl.store(z_prev + z_base + at, centre, mask=inside)
            tl.store(z + z_base + at, centre + (pulls + (centre - before) * momentum), mask=inside)


# One program for each tile.
@triton.jit(do_not_specialize=["num_learners"])
def _update(w, g, s0, s1, shadow, z, z_prev, total, tiles, values, total_squares, num_learners, rate_high, rate_low,
            momentum_high, momentum_low, share_high, share_low, ADAMW: tl.constexpr, STATES: tl.constexpr,
            SHADOW: tl.constexpr, AVERAGES: tl.constexpr, FOLLOWS: tl.constexpr, MOVES: tl.constexpr,
            KEEPS_TOTAL: tl.constexpr):
    tile = tl.program_id(0)
    kind = w.dtype.element_ty
    rate = tl.zeros((1,), kind) + rate_high + rate_low
    momentum = tl.zeros((1,), kind) + momentum_high + momentum_low
    share = tl.zeros((1,), kind) + share_high + share_low
    entry = tiles + tile * _WIDTH
    base, z_base, numel, place = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    at = (place // 4) * TILE + tl.arange(0, TILE)
    decays = (place & 1) != 0
    if (place & 2) != 0:
        _update_tile(w, g, s0, s1, shadow, z, z_prev, total, values, total_squares + tile, base, z_base, numel, at,
                     decays, num_learners, rate, momentum, share, True, ADAMW, STATES, SHADOW, AVERAGES, FOLLOWS,
                     MOVES, KEEPS_TOTAL)
    else:
        _update_tile(w, g, s0, s1, shadow, z, z_prev, total, values, total_squares + tile, base, z_base, numel, at,
                     decays, num_learners, rate, momentum, share, False, ADAMW, STATES, SHADOW, AVERAGES, FOLLOWS,
                     MOVES, KEEPS_TOTAL)


# One program for each tile of z.
@triton.jit
def _move(z, z_prev, total, count, momentum_high, momentum_low, momentum_rest):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    kind = z.dtype.element_ty
    momentum = tl.zeros((1,), kind) + momentum_high
    if kind == tl.float64:
        momentum = momentum + momentum_low + momentum_rest
    pulls = tl.load(total + at, mask=inside, other=0.0)
    centre, before = tl.load(z + at, mask=inside, other=0.0), tl.load(z_prev + at, mask=inside, other=0.0)
    tl.store(z_prev + at, centre, mask=inside)
    tl.store(z + at, centre + (pulls + (centre - before) * momentum), mask=inside)
