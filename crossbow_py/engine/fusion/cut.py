"""The cut through a graph behind its frozen layers: before it nothing is trained, drawn or moved by training.

It is behind the last product (convolution, linear layer, attention) that depends on no trained value, where the fewest
bytes cross.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from crossbow_py.engine.fusion.graph import Cut, FusedGraph, Origin, Step, moves_statistics
from crossbow_py.engine.fusion.rules import draws
from crossbow_py.engine.fusion.rules.registry import base_name, is_in_place

_BY_WEIGHTS = ("linear", "conv1d", "conv2d", "conv3d")
_OF_VALUES = ("matmul", "mm", "bmm", "scaled_dot_product_attention")


def find_cut(graph: FusedGraph, batch_size: int) -> Cut | None:
    """Return the cut of a graph of batches `[B, ...]`; None if no product comes before what is trained.

    All values that cross it are `[B, ...]`.
    """
    leaves, steps = graph.origins(), graph.steps
    origins = _origins(steps, leaves)
    costs = [sum(map(_cost, step.together or (step.node,))) for step in steps]
    inner = [index for index, origin in enumerate(origins) if origin is Origin.INPUTS]
    last_product = max((index for index in inner if costs[index]), default=len(steps))
    best: tuple[int, list[int], list[Node]] | None = None
    for last in (index for index in inner if index >= last_product):
        before = [index for index in inner if index <= last]
        crossing = _crossing(graph, origins, before, leaves)
        if all(_is_batch(node, batch_size) for node in crossing) and not _is_written_late(steps, before):
            size = sum(node.meta["val"].nbytes for node in crossing)
            best = best if best and best[0] < size else (size, before, crossing)
    if best is None or not best[2]:
        return None
    _, before, crossing = best
    frozen = {index for index, origin in enumerate(origins) if origin is Origin.FROZEN}
    rest = set(range(len(steps))) - set(before)
    trained = [index for index in rest if origins[index] is Origin.TRAINED]
    first = _needed(steps, {*before, *frozen}, crossing, ())
    modules = list((steps[last_product].node.meta.get("nn_module_stack") or {}).values())
    return Cut(
        tuple(crossing), first, _needed(steps, rest, graph.outputs, trained), graph.buffers_read(first),
        str(modules[-1][0]) if modules else "", sum(costs[index] for index in before) / sum(costs),
    )  # fmt: skip


def _origins(steps: Sequence[Step], leaves: Mapping[Node, Origin]) -> list[Origin]:
    """Return what each step's value follows from. A write changes that of all nodes that are the written tensor."""
    known, found = dict(leaves), list[Origin]()
    for step in steps:
        own = max((known[node] for node in step.reads), key=lambda each: each.value, default=Origin.FROZEN)
        if step.call.must_write or draws.draws(step.node) or moves_statistics(step.node):
            own = Origin.TRAINED
        found.append(own)
        known |= dict.fromkeys((step.node, *step.others), own)
    return found


def _crossing(
    graph: FusedGraph, origins: Sequence[Origin], before: Sequence[int], leaves: Mapping[Node, Origin]
) -> list[Node]:
    """Return the nodes whose values are made by the steps `before`, or given, and needed by others."""
    inside, steps = set(before), graph.steps
    made = {node for index in before for node in (steps[index].node, *steps[index].others)}
    made |= {node for node, origin in leaves.items() if origin is Origin.INPUTS}
    outside = [index for index, origin in enumerate(origins) if index not in inside and origin is not Origin.FROZEN]
    read = [*(node for index in outside for node in steps[index].reads), *graph.outputs]
    return [node for node in dict.fromkeys(read) if node in made]


def _is_batch(node: Node, batch_size: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.shape[:1] == (batch_size,)


def _is_written_late(steps: Sequence[Step], before: Sequence[int]) -> bool:
    """Return whether a step before the cut writes in place what a step after it reads earlier in the graph."""
    inside = set(before)
    for index in before:
        step = steps[index]
        if isinstance(step.node.target, OpOverload) and is_in_place(step.node.target):
            written = {step.arguments[0], *step.others}
            outside = (other for at, other in enumerate(steps[:index]) if at not in inside)
            if any(written.intersection(other.reads) for other in outside):
                return True
    return False


def _needed(
    steps: Sequence[Step], among: Collection[int], wanted: Sequence[Node], always: Collection[int]
) -> list[Step]:
    """Return the steps among some that `wanted` nodes need, and those that are taken always."""
    needed, found = set(wanted), list[Step]()
    for index in reversed(range(len(steps))):
        step = steps[index]
        if index in among and (index in always or needed.intersection((step.node, *step.others))):
            needed.update(step.reads)
            found.append(step)
    return found[::-1]


def _cost(node: Node) -> int:
    """Return the multiplications of a product; 0 of other operators."""
    value, target = node.meta.get("val"), node.target
    if not isinstance(target, OpOverload) or not isinstance(value, Tensor):
        return 0
    first, second = (own.meta.get("val") if isinstance(own, Node) else None for own in (*node.args[:2], None, None)[:2])
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return 0
    if base_name(target) in _BY_WEIGHTS:
        return value.numel() * (second.numel() // second.shape[0])
    if base_name(target) in _OF_VALUES:
        return value.numel() * (2 * second.shape[-2] if "attention" in base_name(target) else first.shape[-1])
    return 0
