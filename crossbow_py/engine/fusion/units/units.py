"""Finds the units of a graph: a convolution, a BatchNorm, a residual sum and a ReLU that can run as one step.

    convolution → BatchNorm → (+ residual) → ReLU        the last two may be missing, and one of the first two

It only reads an exported graph and names its nodes; `unit_step.py` runs units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from crossbow_py.engine.fusion.regions import modes_of
from crossbow_py.engine.fusion.rules.registry import base_name
from crossbow_py.engine.fusion.writes import Write, memory_of


@dataclass(frozen=True)
class Unit:
    """Nodes that run as one step, in place of the last.

    Attributes:
        convolution, norm: the nodes of `conv2d` and of `batch_norm` with statistics of the batch, or None.
        residual: the node that is added after the norm, or None.
        relu: whether the unit ends with a ReLU.
        last: the node whose value is the unit's.
        nodes: all its nodes, in the graph's order.
    """

    convolution: Node | None
    norm: Node | None
    residual: Node | None
    relu: bool
    last: Node
    nodes: tuple[Node, ...]

    @property
    def input(self) -> Node:
        """The node of the images that the unit takes."""
        first = self.convolution or self.norm
        assert first is not None, "a unit has a convolution or a norm"
        argument = first.args[0]
        assert isinstance(argument, Node), "operators take tensors from nodes"
        return argument

    @property
    def parameters(self) -> tuple[Node, ...]:
        """The nodes of filters, shift, scale and offset, as far as there are any."""
        of_convolution = self.convolution.args[1:3] if self.convolution is not None else ()
        of_norm = self.norm.args[1:3] if self.norm is not None else ()
        return tuple(node for node in (*of_convolution, *of_norm) if isinstance(node, Node))


def find_units(nodes: Sequence[Node], writes: Mapping[Node, Write], parameters: Iterable[Node]) -> list[Unit]:
    """Return the units of a graph, which have no node in common.

    Args:
        nodes: the nodes of the graph in order.
        writes: its in-place operators.
        parameters: placeholders that a unit may own: trained parameters with one user.
    """
    position, own, found, taken = {node: at for at, node in enumerate(nodes)}, set(parameters), [], set[Node]()
    for node in nodes:
        if node in taken:
            continue
        unit = _begin(node)
        if unit is not None and _is_whole(unit, position, nodes, writes, own):
            found.append(unit)
            taken.update(unit.nodes)
    return found


def _begin(node: Node) -> Unit | None:
    if calls(node, "conv2d", "default") and _rank(node) == 4 and _rank(node.args[0]) == 4:
        norm = only_user(node)
        if norm is not None and _normalises(norm) and norm.args[0] is node:
            return _end(node, norm)
        return Unit(node, None, None, False, node, (node,))
    return _end(None, node) if _normalises(node) else None


def _end(convolution: Node | None, norm: Node) -> Unit:
    nodes = [norm] if convolution is None else [convolution, norm]
    residual, relu, user = None, False, only_user(norm)
    if user is not None and calls(user, "add") and len(user.args) == 2 and not user.kwargs:
        others = [argument for argument in user.args if argument is not norm]
        # In place, the sum would be written to the residual, if that came first.
        written = str(user.target).split(".")[1].endswith("_")
        fits = len(others) == 1 and isinstance(others[0], Node) and _same_shape(others[0], norm)
        if fits and not (written and user.args[0] is not norm):
            residual = others[0]
            nodes.append(user)
            user = only_user(user)
    if user is not None and calls(user, "relu"):
        relu = True
        nodes.append(user)
    assert residual is None or isinstance(residual, Node), "what is added is a node"
    return Unit(convolution, norm, residual, relu, nodes[-1], tuple(nodes))


def _is_whole(
    unit: Unit, position: Mapping[Node, int], nodes: Sequence[Node], writes: Mapping[Node, Write], own: set[Node]
) -> bool:
    """Return whether the unit may run in place of its last node, and owns its parameters."""
    if not own.issuperset(unit.parameters) or len(set(unit.parameters)) != len(unit.parameters):
        return False
    if unit.norm is not None and len([node for node in unit.norm.args[1:3] if isinstance(node, Node)]) != 2:
        return False
    return runs_as_one(unit.nodes, {unit.input, unit.residual}, position, nodes, writes)


def runs_as_one(
    part: Sequence[Node],
    given: Collection[Node | None],
    position: Mapping[Node, int],
    nodes: Sequence[Node],
    writes: Mapping[Node, Write],
) -> bool:
    """Return whether a part of a graph may run in place of its last node: no value is written that others see.

    Args:
        part: its nodes in order.
        given: the nodes of the values that it takes.
        position, nodes: all nodes of the graph in order, and their places.
        writes: the graph's in-place operators.
    """
    between, last = nodes[position[part[0]] : position[part[-1]]], part[-1]
    written = [node.args[0] for node in between if node in writes and node not in part]
    written += [other for node in between if node in writes for other in writes[node].others]
    names = [other for node in part if node in writes for other in writes[node].others]
    later = [node for node, write in writes.items() if node.args[0] is last or last in write.others]
    taken, changed = ({memory_of(own) for own in each if isinstance(own, Node)} for each in (given, written))
    return not taken & changed and not names and not later


def _normalises(node: Node) -> bool:
    """Return whether a node is a BatchNorm of images with the statistics of the batch."""
    if not calls(node, "batch_norm") or len(node.args) < 8 or _rank(node) != 4:
        return False
    training, momentum = node.args[5], node.args[6]
    return training is True and isinstance(momentum, float)


def _rank(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.ndim if isinstance(value, Tensor) else -1


def _same_shape(node: Node, other: Node) -> bool:
    values = node.meta.get("val"), other.meta.get("val")
    return all(isinstance(value, Tensor) for value in values) and values[0].shape == values[1].shape  # type: ignore[union-attr]


def calls(node: Node, name: str, overload: str | None = None) -> bool:
    """Return whether a node calls an operator, in place or not, by default with any overload.

    False for a node in a block with modes of its own, which cannot be part of a unit.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or base_name(target) != name:
        return False
    if modes_of(node) is not None:
        return False
    return overload is None or target._overloadname == overload


def only_user(node: Node | None) -> Node | None:
    """Return the node that alone reads a node's value, or None."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None
