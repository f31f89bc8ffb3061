"""The steps of a run: which node or unit each computes, from which values, and which are not needed afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from crossbow_py.engine.fusion.regions import Modes
from crossbow_py.engine.fusion.rules.registry import Call, Rule, loop
from crossbow_py.engine.fusion.values import Fused


@dataclass
class Step:
    """One node, or a unit of several of which it is the last.

    Attributes:
        node: whose value it computes.
        call: its operator.
        arguments, named: what it is given, nodes in place of values.
        others: further names of what it writes.
        rule: what runs it.
        settled: whether the rule is known to serve.
        is_unit: whether it runs several nodes, by a rule that is settled from the beginning.
        modes: of the blocks of the model's forward that the node is in.
        finished: nodes whose values nobody needs afterwards.
    """

    node: Node
    call: Call
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    others: tuple[Node, ...] = ()
    rule: Rule = loop
    settled: bool = False
    is_unit: bool = False
    modes: Modes | None = None
    finished: list[Node] = field(default_factory=list)

    @property
    def reads(self) -> list[Node]:
        """The nodes whose values it takes, each as often as it takes it."""
        return _nodes_in([*self.arguments, *self.named.values()])


@dataclass
class Copies:
    """A value with a tensor of its own for every user, all of one memory: see `run_unit`."""

    values: list[Fused]

    def take(self) -> Fused:
        """One that nobody has had."""
        return self.values.pop()


def resolve(argument: Any, values: Mapping[Node, Any]) -> Any:
    """An argument with values in place of nodes."""
    if isinstance(argument, Node):
        value = values[argument]
        return value.take() if isinstance(value, Copies) else value
    if isinstance(argument, list | tuple):
        return [resolve(entry, values) for entry in argument]
    return argument


def free_after_use(steps: Sequence[Step], output: Node) -> None:
    """Note at every step which values nobody needs any more: activations are freed as early as in eager mode."""
    last: dict[Node, Step] = {}
    for step in steps:
        for node in [step.node, *step.reads]:
            last[node] = step
    for node, step in last.items():
        if node is not output:
            step.finished.append(node)


def _nodes_in(arguments: Sequence[Any]) -> list[Node]:
    found: list[Node] = []
    for argument in arguments:
        if isinstance(argument, Node):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += _nodes_in(argument)
    return found
