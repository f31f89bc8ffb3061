"""Finds chains of linear layers, with a function after each, which C code runs as one step (engine/native/dense.py).

How much sooner rounds are over is measured by experiments/small_layers: 1.1 to 2.4 times as fast within these limits.
A learner has one core, so that the products of a layer are limited, too: others would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from crossbow_py.engine.fusion.rules.registry import Call, base_name
from crossbow_py.engine.fusion.units.units import calls, only_user, runs_as_one
from crossbow_py.engine.fusion.values import Fused, Layout
from crossbow_py.engine.fusion.writes import Write
from crossbow_py.engine.native.dense import FUNCTIONS, DenseChain, Layers

_WIDEST = 128  # outputs; wider layers gain nothing
_MOST_PRODUCTS = 2**24  # multiplications of a learner


@dataclass(frozen=True)
class Chain:
    """Nodes that run as one step, in place of the last.

    Attributes:
        input: the node of the rows `[..., I]`.
        layers: what the layers are.
        parameters: the nodes of weights and biases, layer by layer.
        last: the node whose value it is.
        nodes: all its nodes, in order.
    """

    input: Node
    layers: Layers
    parameters: tuple[Node, ...]
    last: Node
    nodes: tuple[Node, ...]


def find_chains(nodes: Sequence[Node], writes: Mapping[Node, Write], parameters: Iterable[Node]) -> list[Chain]:
    """Return the chains of a graph, which have no node in common.

    Args:
        nodes: the nodes of the graph in order.
        writes: its in-place operators.
        parameters: placeholders that a chain may own: trained parameters with one user.
    """
    position, own, found, taken = {node: at for at, node in enumerate(nodes)}, set(parameters), [], set[Node]()
    for node in nodes:
        if node in taken or not _is_layer(node, own):
            continue
        chain = _from(node, own)
        if runs_as_one(chain.nodes, {chain.input}, position, nodes, writes):
            found.append(chain)
            taken.update(chain.nodes)
    return found


def _from(first: Node, own: set[Node]) -> Chain:
    """Return the longest chain that begins with a layer."""
    nodes, functions, parameters, node = list[Node](), list[str](), list[Node](), first
    while True:
        nodes.append(node)
        parameters += _parameters(node)
        user = only_user(node)
        functions.append(FUNCTIONS[0])
        if user is not None and _is_function(user):
            functions[-1] = base_name(user.target)  # type: ignore[arg-type]
            nodes.append(user)
            user = only_user(user)
        if user is None or not _is_layer(user, own) or user.args[0] is not nodes[-1]:
            break
        node = user
    biases = tuple(len(_parameters(each)) == 2 for each in nodes if calls(each, "linear"))
    source = first.args[0]
    assert isinstance(source, Node), "operators take tensors from nodes"
    return Chain(source, Layers(tuple(functions), biases), tuple(parameters), nodes[-1], tuple(nodes))


def _parameters(node: Node) -> list[Node]:
    return [own for own in node.args[1:3] if isinstance(own, Node)]


def _is_layer(node: Node, own: set[Node]) -> bool:
    """Return whether a node is a small linear layer in float32 with parameters that a chain may own."""
    if not calls(node, "linear") or node.kwargs or not own.issuperset(_parameters(node)):
        return False
    given = [each for each in (node, *node.args[:3]) if isinstance(each, Node)]
    found = [each.meta.get("val") for each in given]
    values = [value for value in found if isinstance(value, Tensor) and value.dtype == torch.float32]
    if len(values) < len(given):
        return False
    outputs, _, weights, *biases = values  # of which torch takes others, too, that broadcast
    is_plain = weights.ndim == 2 and all(own.shape == weights.shape[:1] for own in biases)
    is_small = outputs.shape[-1] <= _WIDEST and outputs.numel() * weights.shape[-1] <= _MOST_PRODUCTS
    return is_plain and is_small and outputs.ndim > 1


def _is_function(node: Node) -> bool:
    return any(calls(node, name) for name in FUNCTIONS[1:]) and len(node.args) == 1 and not node.kwargs


def run_chain(chain: Chain, call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Fused:
    """Return outputs `[K, ..., O]` of the layers."""
    given, *parameters = (call.stack(own) for own in args)
    rows = given.flatten(1, -2) if given.ndim > 3 else given
    found: Tensor = DenseChain.apply(chain.layers, rows, *parameters)  # type: ignore[no-untyped-call]
    return Fused(found.view(*given.shape[:-1], found.shape[-1]), Layout.STACK)
