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

from crossbow_py.core.triton_launch import KernelError, launch

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


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise KernelError unless the kernel agrees with indexing, in both memory orders, with and without erasing.

    The host blocks.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4 * 9 * 8, 3), dtype=torch.uint8, generator=generator).to(device)
    values = torch.rand(256, 3, generator=generator).to(device, dtype)
    ids = torch.tensor([2, 0, 3, 1, 1, 2], device=device)
    mirrored = torch.tensor([0, 1, 1, 0, 1, 0], device=device)
    first = ids * 72 + torch.tensor([0, 9, 26, 17, 3, 11], device=device)
    across = torch.arange(5, device=device)
    across = torch.where(mirrored.view(-1, 1, 1) == 1, 4 - across, across)
    offsets = first.view(-1, 1, 1) + torch.arange(6, device=device).view(-1, 1) * 8 + across
    whole = values[pixels[offsets].long(), torch.arange(3, device=device)].view(2, 3, 6, 5, 3).permute(0, 1, 4, 2, 3)
    all_targets, picks = torch.arange(4, device=device) * 10, torch.stack([ids, first, mirrored])
    edges, erased = torch.zeros(4, 6, dtype=torch.int64, device=device), whole.clone()
    edges[:, 5] = torch.tensor([3, 6, 1, 4], device=device)
    erased[1, 2, :, 3:6, 1:4] = 0
    orders, cases = ((0, 1, 4, 2, 3), (3, 0, 4, 1, 2)), ((picks, whole), (torch.cat([picks, edges]), erased))
    for order, (picked, expected) in itertools.product(orders, cases):
        shape = (2, 3, 6, 5, 3) if order[0] == 0 else (3, 6, 5, 2, 3)
        inputs = torch.zeros(shape, dtype=dtype, device=device).permute(order)
        targets = torch.zeros(2, 3, dtype=torch.int64, device=device)
        gather_images(PixelTable(pixels, 8, values), picked, inputs, all_targets, targets)
        # Host–device synchronisations.
        if not torch.equal(inputs, expected) or not torch.equal(targets.flatten(), all_targets[ids]):
            raise KernelError("the image kernel's batches differ from those of the torch operators")


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
