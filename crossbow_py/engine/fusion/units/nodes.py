"""What those who look for nodes that run as one step ask of the nodes of an exported graph."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import Node

from crossbow_py.engine.fusion.regions import modes_of
from crossbow_py.engine.fusion.rules.registry import base_name


def calls(node: Node, name: str, overload: str | None = None) -> bool:
    """Whether a node calls the operator of that name, in place or not; by default whatever its overload.

    One in a block with modes of its own is never taken for another's part.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or base_name(target) != name:
        return False
    if modes_of(node) is not None:
        return False
    return overload is None or target._overloadname == overload


def only_user(node: Node | None) -> Node | None:
    """The one node that reads a node's value; None where there are others, or none."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
