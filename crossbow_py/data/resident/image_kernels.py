"""A Triton kernel that makes batches of images in one launch: gather, crop, flip, normalise, cast, erase, and targets.

A channel of a pixel has 256 values, so normalising and casting is a look-up among 256 results. The table is computed by
the code that normalises without the kernel, so the results are the same to the bit in every dtype. For a sample the
kernel reads C·H·W bytes and writes C·H·W values; tables and picks stay in the cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton turns a kernel's arguments into pointers and tiles, for which Python has no types.
from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossbow_py.core.triton_launch import KernelError, check_size, launch, repeated, require

_BLOCK = 1024  # values of an image that a program writes, at most
_TARGET_BLOCK = 128
_PICKS, _PICKS_TO_ERASE = 3, 7


class PixelTable(NamedTuple):
    """Images and the normalised values of their pixels, on one device.

    Attributes:
        pixels: uint8 [M, C], contiguous: the pixels of all images row by row, padded for cropping or not.
        row: pixels in a row of a stored image.
        values: [256, C], contiguous: the normalised value of every pixel value in each channel.
    """

    pixels: Tensor
    row: int
    values: Tensor


def gather_images(table: PixelTable, picks: Tensor, inputs: Tensor, all_targets: Tensor, targets: Tensor) -> None:
    """Fill the batches of K learners by one launch on the current stream; the host does not block.

    Args:
        table: the images.
        picks: int64 [3, K·B], learner by learner: sample id, first pixel of the crop in the table, 1 for mirrored or 0.
            They are not checked: wrong ones read foreign memory. Or [7, K·B], with (top, bottom, left, right) of the
            rectangle that becomes 0 in the written image.
        inputs: [K, B, C, H, W] in the dtype of `table.values`, written. Its memory is `[K, B, H, W, C]`, or
            `[B, H, W, K, C]` for grouped operators, which see it as `[B, K·C, H, W]`, channels last.
        all_targets: [N, ...] by sample id, contiguous, real or bool.
        targets: [K, B, ...], contiguous, written.

    Raises:
        KernelError: the tensors are not as described.
    """
    num_learners, batch, channels, height, width = inputs.shape
    interleaved = _interleaved(inputs)
    _check_tensors(table, picks, inputs, all_targets, targets)
    together = num_learners if interleaved else 1
    rows, size = num_learners * batch // together, height * width * channels * together
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch(
        _gather, (rows, triton.cdiv(size, block)),
        table.pixels, table.row, table.values, all_targets, picks, picks.stride(0), inputs, targets, rows, together,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, INTERLEAVED=interleaved, TARGET=targets[0, 0].numel(),
        ERASES=len(picks) == _PICKS_TO_ERASE, BLOCK=block, TARGET_BLOCK=_TARGET_BLOCK,
    )  # fmt: skip


def check(device: torch.device, dtype: torch.dtype, size: tuple[int, int] = (20, 19), channels: int = 3) -> None:
    """Raise KernelError unless the kernel agrees with indexing, in both memory orders, with and without erasing.

    `size` and `channels` are those of the batches' images. The host blocks.
    """
    k, batch = check_size(16, 2), check_size(33, 3)
    # Crops of several blocks, from five images that are stored with more rows and columns.
    (high, wide), generator = size, torch.Generator().manual_seed(0)
    rows, row = high + 4, wide + 3

    def drawn(least: int, most: int) -> Tensor:
        return torch.randint(least, most, (k * batch,), generator=generator).to(device)

    pixels = torch.randint(0, 256, (5 * rows * row, channels), dtype=torch.uint8, generator=generator).to(device)
    values = torch.rand(256, channels, generator=generator).to(device, dtype)
    ids, mirrored = drawn(0, 5), drawn(0, 2)
    first = ids * (rows * row) + drawn(0, rows - high + 1) * row + drawn(0, row - wide + 1)
    top, left = drawn(0, high), drawn(0, wide)
    edges = torch.stack([top, top + drawn(0, 9), left, left + drawn(0, 9)])
    down, right = (torch.arange(size, device=device) for size in (high, wide))
    across = torch.where(mirrored.view(-1, 1) == 1, wide - 1 - right, right)
    offsets = first.view(-1, 1, 1) + down.view(-1, 1) * row + across.unsqueeze(1)
    whole = values[pixels[offsets].long(), torch.arange(channels, device=device)]
    inside = [(at >= begin.view(-1, 1)) & (at < end.view(-1, 1))
              for at, begin, end in ((down, *edges[:2]), (right, *edges[2:]))]  # fmt: skip
    erased = whole.masked_fill((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(3), 0)
    all_targets, picks = torch.arange(5, device=device) * 10, torch.stack([ids, first, mirrored])
    table, cases = PixelTable(pixels, row, values), ((picks, whole), (torch.cat([picks, edges]), erased))
    for interleaved, (picked, expected) in itertools.product((False, True), cases):
        shape, order = ((batch, high, wide, k, channels), (3, 0, 4, 1, 2)) if interleaved else (
            (k, batch, high, wide, channels), (0, 1, 4, 2, 3))  # fmt: skip

        def run(shape=shape, order=order, picked=picked) -> list[Tensor]:
            inputs = torch.zeros(shape, dtype=dtype, device=device).permute(order)
            targets = torch.zeros(k, batch, dtype=torch.int64, device=device)
            gather_images(table, picked, inputs, all_targets, targets)
            return [inputs, targets]

        inputs, targets = repeated("batches", run)
        # Host–device synchronisations.
        same = torch.equal(inputs.permute(0, 1, 3, 4, 2).flatten(0, 1), expected)
        same &= torch.equal(targets.flatten(), all_targets[ids])
        require(same, "the image kernel's batches differ from those of the torch operators")


def _interleaved(inputs: Tensor) -> bool:
    if inputs.permute(0, 1, 3, 4, 2).is_contiguous():
        return False
    if inputs.permute(1, 3, 4, 0, 2).is_contiguous():
        return True
    raise KernelError(f"images go to memory [K, B, H, W, C] or [B, H, W, K, C], not to strides {inputs.stride()}")


def _check_tensors(table: PixelTable, picks: Tensor, inputs: Tensor, all_targets: Tensor, targets: Tensor) -> None:
    samples, channels = inputs.shape[0] * inputs.shape[1], inputs.shape[2]
    fits = picks.shape in ((_PICKS, samples), (_PICKS_TO_ERASE, samples))
    if not fits or picks.dtype != torch.int64 or picks.stride(1) != 1:
        wanted = f"[{_PICKS}, {samples}] or [{_PICKS_TO_ERASE}, {samples}]"
        raise KernelError(f"picks must be int64 {wanted}, not {picks.dtype} {list(picks.shape)}")
    if table.pixels.dtype != torch.uint8 or table.pixels.shape[1] != channels or table.values.shape != (256, channels):
        raise KernelError(f"pixels must be uint8 [M, {channels}] and their values [256, {channels}]")
    if (table.values.dtype, all_targets.dtype) != (inputs.dtype, targets.dtype):
        raise KernelError("a gather does not cast: inputs are of the dtype of the values, targets of all targets")
    if targets.shape != (*inputs.shape[:2], *all_targets.shape[1:]):
        raise KernelError(f"targets must be {[*inputs.shape[:2], *all_targets.shape[1:]]}, not {list(targets.shape)}")
    if not all(each.is_contiguous() for each in (*table[::2], all_targets, targets)):
        raise KernelError("pixels, their values and targets must be contiguous")


# Program (r, i): values i·BLOCK... of row r of the output. A row is an image, or if INTERLEAVED the r-th images of
# all learners; else `learners` is 1. Column l·rows + r of the picks is for learner l. What depends on the number of
# learners is no constant, so that one more learner compiles nothing.
@triton.jit(do_not_specialize=["stride", "rows", "learners"])
def _gather(
    pixels,
    row_pixels,
    values,
    all_targets,
    picks,
    stride,
    inputs,
    targets,
    rows,
    learners,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TARGET: tl.constexpr,
    ERASES: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    size = HEIGHT * WIDTH * CHANNELS * learners
    inside = at < size
    channel, pixel = at % CHANNELS, at // CHANNELS
    column = row
    if INTERLEAVED:
        column += pixel % learners * rows
        pixel //= learners
    first, mirrored = tl.load(picks + stride + column), tl.load(picks + 2 * stride + column)
    y, x = pixel // WIDTH, pixel % WIDTH
    across = tl.where(mirrored != 0, WIDTH - 1 - x, x)
    shown = inside
    if ERASES:
        edges = picks + 3 * stride + column
        top, bottom = tl.load(edges), tl.load(edges + stride)
        left, right = tl.load(edges + 2 * stride), tl.load(edges + 3 * stride)
        shown = inside & ((y < top) | (y >= bottom) | (x < left) | (x >= right))
    # The offset of a crop needs 64 bits; offsets within it do not.
    offsets = (y * row_pixels + across) * CHANNELS + channel
    found = tl.load(pixels + first * CHANNELS + offsets, mask=shown, other=0).to(tl.int32)
    value = tl.load(values + found * CHANNELS + channel, mask=shown, other=0.0)
    tl.store(inputs + row.to(tl.int64) * size + at, value, mask=inside)
    for begin in range(block * TARGET_BLOCK, learners * TARGET, tl.num_programs(1) * TARGET_BLOCK):
        entry = begin + tl.arange(0, TARGET_BLOCK)
        mine = entry < learners * TARGET
        slot = row + entry // TARGET * rows
        sample = tl.load(picks + slot, mask=mine, other=0)
        target = tl.load(all_targets + sample * TARGET + entry % TARGET, mask=mine)
        tl.store(targets + slot.to(tl.int64) * TARGET + entry % TARGET, target, mask=mine)
