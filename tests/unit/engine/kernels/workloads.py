"""Launches of every kernel on small tensors of odd sizes, with several programs each, and what they compute.

A workload takes the module of its kernels, which may be a changed copy, and a dtype, and returns what was written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.kernels.statistics import Statistics

CPU = torch.device("cpu")
# Several tiles of rows and of columns; a split depth; strides, dilation and holes; fewer channels than a tile has.
GEOMETRIES = (
    Geometry(3, 2, 5, 7, 6, 5, (3, 3), padding=(1, 1)),
    Geometry(1, 2, 4, 70, 7, 8, (3, 3), stride=(2, 2), padding=(1, 1)),
    Geometry(5, 2, 3, 2, 12, 12, (3, 3), padding=(1, 1)),
    Geometry(1, 2, 3, 4, 9, 8, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(1, 2)),
)


def norms(kernels, dtype: torch.dtype) -> list[Tensor]:
    """A layer with and without what is optional. Tiles are made small, so that there are many."""
    kernels._SUMMED_VALUES, kernels._MAPPED_VALUES, kernels._SUMMING_PROGRAMS = 256, 256, 14
    wide, written = torch.float64 if dtype == torch.float64 else torch.float32, []
    for rows, columns in ((41, 37), (3, 5)):
        x, residual, first, second = (torch.randn(rows, columns).to(dtype) for _ in range(4))
        weight, bias, *running = (torch.rand(columns, dtype=wide) for _ in range(4))
        space = kernels.workspace_for(rows, columns, dtype, CPU)
        d_weight, d_bias = (torch.empty(columns, dtype=wide) for _ in range(2))
        for relu, added, gradients, kept in (
            (True, residual, [first, second], running), (False, None, [first], (None, None)),
        ):  # fmt: skip
            mean, rstd = kernels.statistics(x, *kept, 0.1, 1e-5, space)
            y = kernels.normalise(x, mean, rstd, weight, bias, added, relu)
            kernels.backward_sums(gradients, x, y, mean, rstd, d_weight, d_bias, relu, space)
            own = kernels.backward_inputs(
                gradients, x, y, mean, rstd, weight, d_weight, d_bias, relu, added is not None
            )
            written += [mean, rstd, y, d_weight.clone(), d_bias.clone(), *(each for each in own if each is not None)]
        written += running
    return written


def convolutions(kernels, dtype: torch.dtype) -> list[Tensor]:
    """Each geometry with statistics and a bias, and both gradients by one launch."""
    written = []
    for g in GEOMETRIES:
        inputs, filters = (
            torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)
            for shape in ((g.batch, g.groups * g.in_channels, g.height, g.width),
                          (g.groups * g.out_channels, g.in_channels, *g.kernel))
        )  # fmt: skip
        running = [torch.rand(len(filters)) for _ in range(2)]
        bias = torch.randn(len(filters)).to(dtype)
        space = kernels.statistics_workspace(g, CPU)
        out, moments = kernels.forward(inputs, filters, bias, g, Statistics(*running, 0.1, 1e-5), space)
        d_filters = torch.empty_like(filters, dtype=torch.float32)
        d_inputs = kernels.backward(
            out, inputs, filters, g, input_gradient=True, filter_gradient=d_filters,
            workspace=kernels.backward_workspace(g, CPU),
        )  # fmt: skip
        written += [out, *moments, *running, d_filters, d_inputs]
    return written


def losses(kernels, dtype: torch.dtype) -> list[Tensor]:
    """Outputs that have others between them in memory, ignored targets, and targets of all learners."""
    kernels._TARGETS = 8
    written = []
    for k, batch, classes in ((3, 19, 11), (2, 5, 1)):
        outputs = torch.randn(batch, k, classes + 2).to(dtype).transpose(0, 1)[:, :, :classes]
        targets = torch.randint(0, classes, (k, batch))
        targets[1, ::3] = -100
        for each in (targets, targets[0]):
            written += kernels.cross_entropy_of_learners(outputs, each)
    return written


def batches(kernels, dtype: torch.dtype) -> list[Tensor]:
    """Both orders in memory, with and without erasing, single targets and rows of them; blocks made small."""
    kernels._BLOCK = 64
    k, b, written = 3, 2, []
    pixels, values = torch.randint(0, 256, (4 * 9 * 8, 3), dtype=torch.uint8), torch.rand(256, 3).to(dtype)
    ids = torch.tensor([2, 0, 3, 1, 1, 3])
    first = ids * 72 + torch.tensor([0, 9, 26, 17, 3, 27])  # the last crop, mirrored, ends with the last pixel
    edges = torch.tensor([[0, 1, 0, 2, 0, 0], [0, 3, 6, 6, 1, 6], [0, 1, 0, 0, 4, 0], [0, 4, 5, 5, 5, 1]])
    picks = torch.cat([torch.stack([ids, first, torch.tensor([0, 1, 1, 0, 1, 1])]), edges])
    for shape, order in (((k, b, 6, 5, 3), (0, 1, 4, 2, 3)), ((b, 6, 5, k, 3), (3, 0, 4, 1, 2))):
        for rows, all_targets in ((3, torch.arange(4) * 10), (7, torch.arange(4 * 131).view(4, 131))):
            inputs = torch.empty(shape, dtype=dtype).permute(order)
            targets = torch.empty(k, b, *all_targets.shape[1:], dtype=torch.int64)
            kernels.gather_images(kernels.PixelTable(pixels, 8, values), picks[:rows], inputs, all_targets, targets)
            written += [inputs, targets]
    return written


def updates(kernels, dtype: torch.dtype) -> list[Tensor]:
    """Three learners, of which one is gated, in a bank for four: blocks of 2,077 values, 68, 201 and 3."""
    master = torch.float64 if dtype == torch.float64 else torch.float32
    numels, k, double = (2077, 68, 201, 3), 3, {"dtype": torch.float64}
    padded = [-(-numel // 32) * 32 for numel in numels]
    offsets, z_offsets = ([times * sum(padded[:i]) for i in range(4)] for times in (4, 1))
    tiles = kernels.make_tiles(list(zip(offsets, z_offsets, numels, (True, True, False, False), strict=True)), CPU)
    written = []
    for optimizer, states in ((kernels.SGD, 1), (kernels.ADAMW, 2), (kernels.SGD, 0)):
        w, g, *state = (torch.rand(4 * sum(padded), dtype=master) for _ in range(2 + states))
        z, z_prev, total = (torch.rand(sum(padded), dtype=master) for _ in range(3))
        shadow = torch.zeros(len(w), dtype=torch.bfloat16) if dtype == torch.bfloat16 else None
        sgd, adamw = kernels.sgd_settings(0.9, 0.1, True, None), kernels.adamw_settings(0.9, 0.99, 1e-8, 0.1, 1.0)
        settings = torch.tensor([adamw if states == 2 else sgd] * k, **double)
        results = torch.tensor([[0.5, 0.0], [torch.nan, 0.0], [2.0, 0.0]], **double)
        rates, counts = torch.full((k,), 0.1, **double), torch.full((k,), 2.0, **double)
        values, partial = torch.zeros(k, kernels.VALUES.value, dtype=master), torch.empty(len(tiles), k, **double)
        kernels.squares(g, tiles, k, partial)
        kernels.prepare(
            partial, settings, results, rates, counts, values, k, optimizer, loss_column=0, finite_column=1
        )
        for momentum, kept, follows in ((0.9, None, False), (None, total, False), (0.2, None, True)):
            rows = kernels.RowsToUpdate(w, g, tuple(state), shadow, z, z_prev, kept)
            squares = torch.empty(len(tiles), **double)
            kernels.update(
                rows, tiles, values, k, optimizer, correction=0.3, momentum=momentum, share=1 / 3 if follows else 1.0,
                follows=follows, total_squares=squares,
            )  # fmt: skip
        kernels.move(z, z_prev, total, 0.9)
        written += [w, *state, z, z_prev, total, results, counts, squares, *([] if shadow is None else [shadow])]
    return written


WORKLOADS = {"batch_norm": norms, "convolution": convolutions, "cross_entropy": losses, "image_kernels": batches,
             "update": updates}  # fmt: skip
