"""A function of one tensor as the plain list of operators it calls: what is left when nothing has to be decided."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

Forward = Callable[[Tensor], Tensor]
_SAME = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@torch.no_grad()
def recorded(run: Forward, inputs: Tensor) -> Forward:
    """What `run` calls for `inputs`, for tensors of that shape and format; what hangs on no input is computed once.

    `run` has been called before, so that it decides nothing any more. Where it cannot be recorded, or where what was
    recorded gives another answer, it is `run` itself.
    """
    expected = run(inputs)
    try:
        replay = _compiled(make_fx(run)(inputs))
        found = replay(inputs)
    except Exception:  # tracing calls what it likes, and raises what that raises
        return run
    close = found.dtype == expected.dtype and torch.allclose(found, expected, 0, _SAME.get(expected.dtype, 0))
    return replay if close else run


def _compiled(program: GraphModule) -> Forward:
    constants = _fold(program)
    rest, named = _without(program.graph, constants), {node.name: value for node, value in constants.items()}
    forward, own = type(GraphModule(named, rest)).forward, SimpleNamespace(**named)
    return lambda inputs: forward(own, inputs)  # attributes of modules are slow to look up


def _fold(program: GraphModule) -> dict[Node, Any]:
    """The values of all nodes that hang on no input."""
    known: dict[Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(program, str(node.target))
        elif node.op == "call_function" and _is_constant(node, known):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    return known


def _is_constant(node: Node, known: dict[Node, Any]) -> bool:
    target = node.target
    changes = isinstance(target, OpOverload) and (
        target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    )
    return not changes and bool(node.all_input_nodes) and all(each in known for each in node.all_input_nodes)


def _without(graph: Graph, constants: dict[Node, Any]) -> Graph:
    """The graph with an attribute of its name in place of every constant that is still read."""
    rest = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in constants:
            if any(user not in constants for user in node.users):
                copies[node] = rest.create_node("get_attr", node.name, name=node.name)
        else:
            copies[node] = rest.node_copy(node, copies.__getitem__)
    return rest
