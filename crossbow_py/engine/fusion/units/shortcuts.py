"""Shortcuts without parameters in one step: every s-th pixel of an image, with channels of zeros around its own.

ResNets for small images have them where a stage halves the image (He et al. 2016, option A). As operators they are two
slices and a padding of channels, each with copies forward and backward; here they are two launches each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from crossbow_py.engine.fusion.rules.registry import Call
from crossbow_py.engine.fusion.units.units import calls, only_user
from crossbow_py.engine.fusion.values import Fused, Layout, channels_last, folds, split_learners
from crossbow_py.engine.fusion.writes import Write

_TO_THE_END = 2**31  # the least end of a slice without one


@dataclass(frozen=True)
class Shortcut:
    """Nodes that run as one step, in place of the last.

    Attributes:
        input: the node of the images `[B, C, H, W]`.
        strides: the strides of rows and columns.
        padding: the channels added before and after.
        last: the node whose value it is.
        nodes: all its nodes, in order.
    """

    input: Node
    strides: tuple[int, int]
    padding: tuple[int, int]
    last: Node
    nodes: tuple[Node, ...]


def find_shortcuts(nodes: Sequence[Node], writes: Mapping[Node, Write]) -> list[Shortcut]:
    """Return the shortcuts of a graph whose inputs no in-place operator writes."""
    written = {node.args[0] for node in writes} | {other for write in writes.values() for other in write.others}
    found = []
    for node in nodes:
        rows, last = _sliced(node, 2), only_user(only_user(node))
        columns, padding = _sliced(only_user(node), 3), _padded(last)
        source = node.args[0] if node.args else None
        if rows is None or columns is None or padding is None or last is None or not isinstance(source, Node):
            continue
        between = (node, *node.users, last)
        images = source.meta.get("val")
        is_batch = isinstance(images, Tensor) and images.ndim == 4  # else the padding is not of channels
        if is_batch and source not in written and not written.intersection(between):
            found.append(Shortcut(source, (rows, columns), padding, last, between))
    return found


def _sliced(node: Node | None, dim: int) -> int | None:
    """Return the step of a slice along a whole dimension, or None."""
    if node is None or not calls(node, "slice") or len(node.args) != 5:
        return None
    _, along, begin, end, step = node.args
    whole = along == dim and begin == 0 and isinstance(end, int) and end >= _TO_THE_END
    return step if whole and isinstance(step, int) else None


def _padded(node: Node | None) -> tuple[int, int] | None:
    """Return the channels of zeros that a node pads with, before and after, or None if it pads anything else."""
    if node is None or not calls(node, "pad") or len(node.args) != 2 or node.kwargs:
        return None
    widths = node.args[1]
    if not isinstance(widths, list | tuple) or len(widths) != 6 or any(width != 0 for width in widths[:4]):
        return None
    before, behind = widths[4:]
    if not isinstance(before, int) or not isinstance(behind, int) or min(before, behind) < 0:
        return None
    return before, behind


def run_shortcut(shortcut: Shortcut, call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Fused:
    """Return `[B, K·(before + C + after), ⌈H/s⌉, ⌈W/s⌉]` for images `[B, K·C, H, W]`, all channels-last.

    Images `[K, B, ...]` that fold are taken as `[K·B, ...]`.
    """
    if folds(args[0]):
        found = _Run.apply(channels_last(args[0].tensor.flatten(0, 1)), shortcut, 1)  # type: ignore[no-untyped-call]
        return Fused(split_learners(found, 0, call.num_learners), Layout.STACK)
    images = channels_last(call.channels(args[0]))
    return Fused(_Run.apply(images, shortcut, call.num_learners), Layout.CHANNELS)  # type: ignore[no-untyped-call]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, shortcut: Shortcut, num_learners: int) -> Tensor:
        ctx.shape, ctx.shortcut, ctx.num_learners = images.shape, shortcut, num_learners
        taken = split_learners(_taken(images, shortcut).permute(0, 2, 3, 1), 3, num_learners)
        width = sum(shortcut.padding) + taken.shape[-1]
        whole = taken.new_zeros(*taken.shape[:-1], width)
        whole.narrow(-1, shortcut.padding[0], taken.shape[-1]).copy_(taken)
        return whole.flatten(3).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        shortcut: Shortcut = ctx.shortcut
        own = ctx.shape[1] // ctx.num_learners
        parts = split_learners(given[0].permute(0, 2, 3, 1), 3, ctx.num_learners).narrow(-1, shortcut.padding[0], own)
        batch, wide_channels, *size = ctx.shape
        result = given[0].new_zeros(batch, *size, wide_channels).permute(0, 3, 1, 2)
        split_learners(_taken(result, shortcut).permute(0, 2, 3, 1), 3, ctx.num_learners).copy_(parts)
        return result, None, None


def _taken(images: Tensor, shortcut: Shortcut) -> Tensor:
    return images[:, :, :: shortcut.strides[0], :: shortcut.strides[1]]
