"""2-D convolution with a learner axis as implicit matrix products: forward, and the gradients of inputs and filters.

Images are channels-last with the groups' channels side by side, `[B, H, W, G·C]`; filters are stored as in a bank in
`blocks`, `[G, O, KH, KW, C]`. A group is a learner, or a group of a learner's grouped convolution. Every group is a
matrix product, and one launch computes all of them. With n an image, (r, s) a position in the filter, and i(y, r) =
y·stride − padding + r·dilation:

    out[n, y, x, o] = Σ_rsc  in[n, i(y, r), i(x, s), c] · w[o, r, s, c]          rows n·y·x, columns o, depth r·s·c
    d_in[n, h, v, c] = Σ_rso  d_out[n, y, x, o] · w[o, r, s, c]                  rows n·h·v, columns c, depth r·s·o
    d_w[o, r, s, c] = Σ_nyx  d_out[n, y, x, o] · in[n, i(y, r), i(x, s), c]      rows o, columns r·s·c, depth n·y·x

where in the second y and x satisfy i(y, r) = h and i(x, s) = v. Factors are bfloat16 or float32, and sums float32. The
third has few rows and columns and great depth, which is split among programs; the last one to finish adds up their sums
in a fixed order, so that these kernels' results repeat bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels become pointers and tiles when Triton compiles them, for which Python has no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossbow_py.core.triton_launch import interprets, launch
from crossbow_py.engine.device.cudnn import uses_tf32
from crossbow_py.engine.kernels.geometry import Geometry, Tiles, tiles_of
from crossbow_py.engine.kernels.statistics import Statistics, Workspace, finish_statistics

_LANES = 2048  # divided by columns: the tiles whose statistics are read at once


def precision_of(dtype: torch.dtype) -> str:
    """Return how `_dot` multiplies: float32 as TF32 if torch's convolutions may."""
    if dtype == torch.bfloat16 and interprets():
        return "widened"
    return "tf32" if dtype == torch.float32 and uses_tf32() else "ieee"


def statistics_workspace(geometry: Geometry, device: torch.device, tiles: Tiles | None = None) -> Workspace:
    """Return the workspace for the statistics of a forward convolution."""
    tile = (tiles or tiles_of(geometry)).forward
    blocks = geometry.groups * triton.cdiv(geometry.out_channels, tile.columns)
    columns = geometry.groups * geometry.out_channels
    return Workspace.of_tiles(triton.cdiv(geometry.out_rows, tile.rows), blocks, columns, device)


def forward(
    inputs: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    statistics: Statistics | None = None,
    workspace: Workspace | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return outputs `[B, G·O, OH, OW]`, channels-last, in the dtype of the inputs; and their mean and rstd `[G·O]`.

    Args:
        inputs: images `[B, G·C, H, W]`, channels-last.
        filters: `[G·O, C, KH, KW]`, channels-last in memory.
        bias: `[G·O]` or None.
        geometry: the sizes.
        statistics: those of the BatchNorm after it, computed from the sums before these are rounded; without it there
            is no mean and no rstd.
        workspace: from `statistics_workspace`, for `statistics`.
        tiles: other tiles than those of the geometry, to try them at a small size; likewise those of the workspace.
    """
    tile = (tiles or tiles_of(geometry)).forward
    out = torch.empty(
        (geometry.batch, geometry.groups * geometry.out_channels, *geometry.out_size),
        dtype=inputs.dtype, device=inputs.device, memory_format=torch.channels_last,
    )  # fmt: skip
    places: tuple[Tensor | None, ...] = (None,) * 6
    options: dict[str, float] = {"MOMENTUM": 0.0, "EPS": 0.0}
    moments = None
    if statistics is not None:
        assert workspace is not None, "statistics need a workspace"
        moments = torch.empty(len(filters), device=inputs.device), torch.empty(len(filters), device=inputs.device)
        places = (
            workspace.partials, workspace.counters, *moments, statistics.running_mean, statistics.running_var
        )
        options = {"MOMENTUM": statistics.momentum, "EPS": statistics.eps}
    launch(
        _forward, (tile.tiles(geometry.out_rows, geometry.out_channels), geometry.groups),
        inputs, filters, bias, out, *places, geometry.out_rows, geometry.groups, **geometry.constants(), **options,
        BM=tile.rows, BN=tile.columns, BK=tile.depth, PRECISION=precision_of(inputs.dtype),
        LANES=_LANES // tile.columns, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, moments


def backward_workspace(geometry: Geometry, device: torch.device, tiles: Tiles | None = None) -> Workspace:
    """Return the workspace for `backward`."""
    tile, columns = (tiles or tiles_of(geometry)).filters, geometry.taps * geometry.in_channels
    rows = tile.splits if tile.splits > 1 else 0
    return Workspace(
        torch.empty(rows, geometry.groups, geometry.out_channels, columns, device=device),
        torch.zeros(
            geometry.groups * tile.tiles(geometry.out_channels, columns), dtype=torch.int32, device=device
        ),
    )


def backward(
    outputs: Tensor,
    inputs: Tensor,
    filters: Tensor,
    geometry: Geometry,
    *,
    input_gradient: bool,
    filter_gradient: Tensor | None,
    workspace: Workspace,
    tiles: Tiles | None = None,
) -> Tensor | None:
    """Compute both gradients in one launch. Returns that of the inputs `[B, G·C, H, W]`, channels-last, or None.

    Args:
        outputs: the gradient of the outputs `[B, G·O, OH, OW]`, channels-last.
        inputs, filters: those of `forward`.
        geometry: the sizes.
        input_gradient: whether to compute the gradient of the inputs.
        filter_gradient: the result for the filters, with their memory layout and any floating dtype; None for none.
        workspace: from `backward_workspace`.
        tiles: see `forward`.
    """
    chosen = tiles or tiles_of(geometry)
    data, own = chosen.inputs, chosen.filters
    data_programs = data.tiles(geometry.in_rows, geometry.in_channels) if input_gradient else 0
    columns = geometry.taps * geometry.in_channels
    filter_programs = own.tiles(geometry.out_channels, columns) * own.splits if filter_gradient is not None else 0
    result = torch.empty_like(inputs, memory_format=torch.channels_last) if input_gradient else None
    launch(
        _backward, (data_programs + filter_programs, geometry.groups),
        outputs, inputs, filters, result, filter_gradient, workspace.partials, workspace.counters, data_programs,
        geometry.in_rows, geometry.out_rows, geometry.groups, own.splits, **geometry.constants(), DATA=input_gradient,
        FILTERS=filter_gradient is not None, BM=data.rows, BN=data.columns, BK=data.depth, FM=own.rows,
        FN=own.columns, FK=own.depth, SPLIT=own.splits > 1, PRECISION=precision_of(inputs.dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return result


# total + a·b. Triton's interpreter multiplies the bits of bfloat16 as integers, so there they are widened first.
@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


# Where a pixel lies, or how far it is. Addresses are sums of a part for rows and a part for columns, as far as can be,
# so that little is computed for each value of a tile.
@triton.jit
def _pixel(image, y, x, H: tl.constexpr, W: tl.constexpr, channels):
    return ((image * H + y) * W + x).to(tl.int64) * channels


# The quotient and the remainder. This is a difference: LLVM knows how large a remainder by `%` can be, narrows what is
# computed from it to 16 bits, and adds two such values in one instruction. For compute capability 9.0, NVIDIA's ptxas
# of CUDA 12.8 to 13.0 then forgets to add the constant where only one half of the sum is used.
@triton.jit
def _divided(value, by: tl.constexpr):
    quotient = value // by
    return quotient, value - quotient * by


# The image of a row of pixels, and the pixel's row and column in it.
@triton.jit
def _place_of(m, H: tl.constexpr, W: tl.constexpr):
    image, pixel = _divided(m, H * W)
    y, x = _divided(pixel, W)
    return image, y, x


# What depends on the number of learners is no constant, and nothing is compiled for what it is divisible by: one more
# learner compiles nothing, but where it changes the tiles.
_OF_LEARNERS = ["groups", "splits", "data_programs"]


# Grid: (tiles of rows and columns, groups). Tiles of one row of pixels follow each other.
@triton.jit(do_not_specialize=_OF_LEARNERS)
def _forward(
    inputs, filters, bias, out, partials, counters, mean, rstd, running_mean, running_var, rows, groups,
    C: tl.constexpr, O: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
    OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, MOMENTUM: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column_tiles: tl.constexpr = (O + BN - 1) // BN
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    m = row_tile * BM + tl.arange(0, BM)
    o = column_tile * BN + tl.arange(0, BN)
    image, y_out, x_out = _place_of(m, OH, OW)
    top, left = y_out * SY - PY, x_out * SX - PX
    own_filters = filters + (group * O + o) * (KH * KW * C)
    own_inputs = inputs + _pixel(image, top, left, H, W, groups * C) + group * C
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, KH * KW * C, BK):
        k = first + tl.arange(0, BK)
        place, c = _divided(k, C)
        tap_y, tap_x = _divided(place, KW)
        y = top[:, None] + tap_y[None, :] * DY
        x = left[:, None] + tap_x[None, :] * DX
        there = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (m < rows)[:, None] & (k < KH * KW * C)[None, :]
        tap = _pixel(0, tap_y * DY, tap_x * DX, H, W, groups * C) + c
        a = tl.load(own_inputs[:, None] + tap[None, :], mask=there, other=0.0)
        b = tl.load(own_filters[None, :] + k[:, None], mask=(k < KH * KW * C)[:, None] & (o < O)[None, :], other=0.0)
        total = _dot(a, b, total, PRECISION)
    columns, column_mask, row_mask = group * O + o, o < O, m < rows
    if bias is not None:
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    place_out = m[:, None].to(tl.int64) * (groups * O) + columns[None, :]
    tl.store(out + place_out, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
    if partials is not None:
        finish_statistics(
            total, row_mask, columns, column_mask, row_tile, tl.cdiv(rows, BM), BM, rows, groups * O, partials,
            counters + group * column_tiles + column_tile, mean, rstd, running_mean, running_var, MOMENTUM, EPS, LANES,
        )  # fmt: skip


# Grid: (tiles of d_in, then tiles of d_w times splits; groups).
@triton.jit(do_not_specialize=_OF_LEARNERS)
def _backward(
    outputs, inputs, filters, d_inputs, d_filters, partials, counters, data_programs, in_rows, out_rows, groups,
    splits, C: tl.constexpr, O: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
    OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, DATA: tl.constexpr, FILTERS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FM: tl.constexpr, FN: tl.constexpr, FK: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    group, program = tl.program_id(1), tl.program_id(0)
    if program < data_programs:
        if DATA:
            _input_gradient(
                outputs, filters, d_inputs, program, group, in_rows, groups, C, O, H, W, OH, OW, KH, KW, SY, SX, PY, PX,
                DY, DX, BM, BN, BK, PRECISION,
            )  # fmt: skip
    elif FILTERS:
        _filter_gradient(
            outputs, inputs, d_filters, partials, counters, program - data_programs, group, out_rows, groups,
            splits, C, O, H, W, OH, OW, KH, KW, SY, SX, PY, PX, DY, DX, FM, FN, FK, SPLIT, PRECISION,
        )  # fmt: skip


@triton.jit
def _input_gradient(
    outputs, filters, d_inputs, program, group, rows, groups, C: tl.constexpr, O: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (C + BN - 1) // BN
    m = (program // column_tiles) * BM + tl.arange(0, BM)
    c = (program % column_tiles) * BN + tl.arange(0, BN)
    image, y_in, x_in = _place_of(m, H, W)
    down, right = y_in + PY, x_in + PX
    own_outputs = outputs + _pixel(image, 0, 0, OH, OW, groups * O) + group * O
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, KH * KW * O, BK):
        k = first + tl.arange(0, BK)
        place, o = _divided(k, O)
        tap_y, tap_x = _divided(place, KW)
        # Times the stride; below zero there is no output, and C's division is not Python's: the mask sees to both.
        y_stride = down[:, None] - tap_y[None, :] * DY
        x_stride = right[:, None] - tap_x[None, :] * DX
        y, x = y_stride // SY, x_stride // SX
        there = (y_stride >= 0) & (y < OH) & (x_stride >= 0) & (x < OW) & (m < rows)[:, None]
        there = there & (k < KH * KW * O)[None, :]
        if SY > 1:
            there = there & (y_stride % SY == 0)
        if SX > 1:
            there = there & (x_stride % SX == 0)
        # Within an image 32 bits are enough, see `Geometry.constants`.
        a = tl.load(own_outputs[:, None] + ((y * OW + x) * (groups * O) + o[None, :]), mask=there, other=0.0)
        from_filter = ((group * O + o) * (KH * KW) + place) * C
        b = tl.load(
            filters + from_filter[:, None] + c[None, :], mask=(k < KH * KW * O)[:, None] & (c < C)[None, :], other=0.0
        )
        total = _dot(a, b, total, PRECISION)
    to = m[:, None].to(tl.int64) * (groups * C) + group * C + c[None, :]
    tl.store(d_inputs + to, total.to(d_inputs.dtype.element_ty), mask=(m < rows)[:, None] & (c < C)[None, :])


@triton.jit
def _filter_gradient(
    outputs, inputs, d_filters, partials, counters, program, group, rows, groups, splits, C: tl.constexpr,
    O: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr,
    DX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    DEPTH: tl.constexpr = KH * KW * C
    column_tiles: tl.constexpr = (DEPTH + BN - 1) // BN
    tile, split = program // splits, program % splits
    o = (tile // column_tiles) * BM + tl.arange(0, BM)
    k = (tile % column_tiles) * BN + tl.arange(0, BN)
    place, c = _divided(k, C)
    tap_y, tap_x = _divided(place, KW)
    own_inputs = inputs + _pixel(0, tap_y * DY, tap_x * DX, H, W, groups * C) + group * C + c
    own_outputs = outputs + tl.arange(0, BK)[:, None] * (groups * O) + (group * O + o)[None, :]
    part = tl.cdiv(tl.cdiv(rows, BK), splits) * BK  # rows of a split, whole steps
    total = tl.zeros((BM, BN), tl.float32)
    begin = split * part
    for step in range(0, tl.minimum(rows - begin, part), BK):
        first = begin + step
        m = first + tl.arange(0, BK)
        image, y_out, x_out = _place_of(m, OH, OW)
        top, left = y_out * SY - PY, x_out * SX - PX
        y = top[:, None] + tap_y[None, :] * DY
        x = left[:, None] + tap_x[None, :] * DX
        there = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (m < rows)[:, None] & (k < DEPTH)[None, :]
        # Likewise, so that 64 bits are multiplied once.
        corner = image.to(tl.int64) * (H * W * C * groups) + (top * W + left) * (groups * C)
        b = tl.load(own_inputs[None, :] + corner[:, None], mask=there, other=0.0)
        from_out = first.to(tl.int64) * (groups * O)
        a = tl.load(own_outputs + from_out, mask=(m < rows)[:, None] & (o < O)[None, :], other=0.0)
        total = _dot(tl.trans(a), b, total, PRECISION)
    mask = (o < O)[:, None] & (k < DEPTH)[None, :]
    to = (group * O + o)[:, None].to(tl.int64) * DEPTH + k[None, :]
    if not SPLIT:
        tl.store(d_filters + to, total.to(d_filters.dtype.element_ty), mask=mask)
    else:
        size = groups * (O * DEPTH)
        tl.store(partials + split * size + to, total, mask=mask)
        tl.debug_barrier()  # all threads' stores come before the ticket
        tiles: tl.constexpr = ((O + BM - 1) // BM) * column_tiles
        counter = counters + group * tiles + tile
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter, 0)
            total = tl.zeros((BM, BN), tl.float32)
            for other in range(splits):
                total += tl.load(partials + other * size + to, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(d_filters + to, total.to(d_filters.dtype.element_ty), mask=mask)
