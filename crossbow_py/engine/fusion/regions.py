"""Blocks of a forward under `torch.no_grad()` or `torch.autocast()`.

torch.export makes one operator of each block, which holds the block's graph. Here the nodes of that graph are put back
in line, and every node remembers the modes it runs in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.fx import Graph, GraphModule, Node

from crossbow_py.engine.fusion.writes import FusionError

_NO_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_MODES = "crossbow_modes"  # in a node's meta


@dataclass(frozen=True)
class Modes:
    """The modes that a block of a forward sets; None where it leaves one as it is.

    Attributes:
        grad: whether autograd follows the block.
        autocast: whether operators choose their number format; then `device_type` and `dtype` say how.
    """

    grad: bool | None = None
    autocast: bool | None = None
    device_type: str = "cpu"
    dtype: torch.dtype | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run an operator of the block as the model's own forward would run it."""
        with ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad and torch.is_grad_enabled()))
            if self.autocast:
                stack.enter_context(torch.autocast(self.device_type, self.dtype, cache_enabled=False))
            yield


def modes_of(node: Node) -> Modes | None:
    """The modes of the blocks around a node; None outside of any."""
    modes: Modes | None = node.meta.get(_MODES)
    return modes


def is_followed(node: Node) -> bool:
    """Whether autograd follows what a node computes."""
    modes = modes_of(node)
    return modes is None or modes.grad is not False


def put_in_line(module: GraphModule) -> None:
    """Replace the blocks of a graph by their nodes, in place.

    Raises:
        FusionError: torch.export lost a mode of the block.
    """
    graph = module.graph
    blocks = [node for node in graph.nodes if _kind(node) is not None]
    _check_splits(blocks)
    for node in blocks:
        _put_in_line(node, module)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _kind(node: Node) -> str | None:
    name = getattr(node.target, "__name__", None)
    known = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    return name if known and name in (_NO_GRAD, _AUTOCAST) else None


def _check_splits(blocks: list[Node]) -> None:
    """torch 2.13 splits an autocast block where grad mode changes inside it, and then forgets that it changes."""
    for first, second in pairwise(blocks):
        if _kind(first) == _kind(second) == _AUTOCAST and first.args[:4] == second.args[:4] and _meet(first, second):
            raise FusionError(
                "it switches gradients on or off inside torch.autocast, which torch.export loses; put torch.autocast "
                "inside torch.no_grad",
                second,
            )


def _meet(first: Node, second: Node) -> bool:
    """Whether nothing is computed between two blocks."""
    node = first.next
    while node is not second:
        if node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem":
            return False
        node = node.next
    return True


def _put_in_line(block: Node, module: GraphModule) -> None:
    place = next(index for index, argument in enumerate(block.args) if _is_graph(argument))
    inner = module.get_submodule(str(block.args[place].target))  # type: ignore[union-attr]
    assert isinstance(inner, GraphModule), "a block holds a graph"
    put_in_line(inner)
    returned = _copy(inner.graph, block, block.args[place + 1 :])
    for part in list(block.users):
        part.replace_all_uses_with(returned[part.args[1]])  # type: ignore[index]
        block.graph.erase_node(part)
    block.graph.erase_node(block)


def _is_graph(argument: object) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _copy(inner: Graph, block: Node, operands: tuple[object, ...]) -> list[Node]:
    """Copy a block's nodes to the place before it; returns those whose values the block returns."""
    own = list(inner.nodes)
    values = dict(zip((node for node in own if node.op == "placeholder"), operands, strict=True))
    with block.graph.inserting_before(block):
        for node in own:
            if node.op == "call_function":
                values[node] = copied = block.graph.node_copy(node, lambda each: values[each])
                copied.meta[_MODES] = _inside(block, modes_of(node))
    return [values[node] for node in inner.output_node().args[0]]  # type: ignore[union-attr]


def _inside(block: Node, own: Modes | None) -> Modes:
    """The modes of a node in a block: those of the innermost blocks around it."""
    own = own or Modes()
    if _kind(block) == _NO_GRAD:
        return replace(own, grad=bool(block.args[0])) if own.grad is None else own
    if own.autocast is not None:
        return own
    device_type, dtype, enabled = block.args[:3]
    return replace(own, autocast=bool(enabled), device_type=str(device_type), dtype=dtype)  # type: ignore[arg-type]
