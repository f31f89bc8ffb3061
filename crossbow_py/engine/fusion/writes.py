"""In-place operators of an exported graph: what they write, and which values change with them.

Values of all learners do not always share memory as one learner's would: a view may be a copy here, and a copy a view.
So writes are followed by name, not by memory: every node that is the written tensor gets the new value. A graph that
later uses other tensors of the same memory is refused, because only memory could give their values.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from crossbow_py.core.errors import CrossbowError
from crossbow_py.engine.fusion.rules.registry import base_name, is_in_place
from crossbow_py.engine.modules.code_lines import line_of

_RETURNS_ITS_INPUT = ("type_as", "dropout", "feature_dropout")  # they may, although their schemas do not say so


class FusionError(CrossbowError):
    """A model cannot run fused; the message says why, as part of a sentence, and names the line of the model's code.

    Args:
        reason: part of a sentence.
        node: the node of the exported graph that it is about.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason if node is None else f"{reason}{line_of(node)}")


@dataclass(frozen=True)
class Write:
    """An in-place operator.

    Attributes:
        others: other nodes that are the written tensor and are used afterwards.
        may_write: whether its first argument has memory of its own, which may be overwritten.
        must_write: whether it changes a buffer, which outlives the run.
    """

    others: tuple[Node, ...] = ()
    may_write: bool = False
    must_write: bool = False


NOTHING = Write()


def find_writes(nodes: Sequence[Node], buffers: Collection[Node], fixed: Collection[Node]) -> dict[Node, Write]:
    """Return all in-place operators of a graph.

    Args:
        nodes: the nodes of the graph in order, with the output last.
        buffers: placeholders that may be written, and keep what is written.
        fixed: placeholders that may not be written.

    Raises:
        FusionError: a write cannot be followed by name.
    """
    position = {node: index for index, node in enumerate(nodes)}
    last = {node: max((position[user] for user in node.users), default=-1) for node in nodes}
    memory = {node: memory_of(node) for node in nodes}
    found = {}
    for node in nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload) or not target._schema.is_mutable:
            continue
        written = node.args[0] if node.args else None
        if not is_in_place(target) or not isinstance(written, Node):
            raise FusionError(f"it writes to several tensors in one operator ({target._schema.name})", node)
        now, tensor = position[node], _tensor(written)
        together = [other for other in nodes[:now] if memory[other] is memory[written] and last[other] > now]
        if any(_tensor(other) is not tensor for other in together):
            raise FusionError(f"it writes through a view ({base_name(target)}_)", node)
        base = memory[written]
        if base in fixed:
            raise FusionError(f"it writes to {base.name}, which is no buffer", node)
        if base in buffers and tensor is not base:
            raise FusionError(f"it writes through a view of a buffer ({node.target})", node)
        found[node] = Write(
            others=tuple(together),
            may_write=tensor in buffers or (tensor is memory[tensor] and tensor.op == "call_function"),
            must_write=tensor in buffers,
        )
    return found


def _tensor(node: Node) -> Node:
    """Return the first node that is a tensor: in-place operators return what they wrote."""
    while isinstance(node.target, OpOverload) and is_in_place(node.target) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def memory_of(node: Node) -> Node:
    """Return the node that made the memory of a value."""
    base = _base(node)
    while base is not None:
        node, base = base, _base(base)
    return node


def _base(node: Node) -> Node | None:
    """Return the node whose memory this node's value may share, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    first, target = node.args[0], node.target
    if target is operator.getitem:
        return _base(first)  # a piece of a split; results of other operators have memory of their own
    if not isinstance(target, OpOverload):
        return None
    name, given = base_name(target), node.args
    drops = "dropout" in name and len(given) == 3 and given[1] != 0 and bool(given[2])
    shares = target._schema.arguments[0].alias_info is not None or (name in _RETURNS_ITS_INPUT and not drops)
    return first if shares else None
