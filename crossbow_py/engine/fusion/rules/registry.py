"""Which rule serves an operator, and what a rule is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from crossbow_py.engine.fusion.values import of_learner, stacked_results
from crossbow_py.engine.modules.dropout import OwnDraws


class NotFusedError(Exception):
    """A rule does not cover these arguments; the operator is run learner by learner."""


@dataclass(frozen=True)
class Call:
    """One operator of the graph for K learners.

    Attributes:
        target: the ATen operator as it was exported.
        shape: of one learner's result; None when it is no tensor.
        num_learners: K.
        generators: each learner's own stream of random numbers.
        dropout_rates: each learner's own share to drop, or None, where the operator's own holds; read in every run.
        learners: which of these rates are theirs.
        may_write: of an in-place operator, whether it may overwrite the memory of its first argument.
        must_write: whether it has to: what it changes is a buffer, and outlives the run.
    """

    target: OpOverload
    shape: tuple[int, ...] | None
    num_learners: int
    generators: list[torch.Generator]
    dropout_rates: Sequence[float | None]
    learners: range
    may_write: bool = False
    must_write: bool = False

    @property
    def draws(self) -> bool:
        """Whether the operator may draw from the learners' generators; on CUDA it draws from torch's own in a loop."""
        seeded = torch.Tag.nondeterministic_seeded in self.target.tags
        return seeded and self.generators[0].device.type == "cpu"

    @property
    def functional(self) -> OpOverload:
        """The operator that does the same and leaves its argument alone."""
        return functional(self.target)

    def perform(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator on tensors; one in place on a copy, unless it may overwrite."""
        if is_in_place(self.target) and not self.may_write:
            return self.target(args[0].clone(), *args[1:], **kwargs)
        return self.target(*args, **kwargs)


Rule = Callable[[Call, list[Any], Mapping[str, Any]], Any]
RULES: dict[str, Rule] = {}  # by the operator's name without overload and without the underscore of in-place ones


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, such as `conv2d`."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def base_name(target: OpOverload) -> str:
    """`relu` of `aten.relu_.default`."""
    name = str(target._schema.name).split("::")[1]
    return name.removesuffix("_") if is_in_place(target) else name


def is_in_place(target: OpOverload) -> bool:
    """Whether the operator writes its first argument and returns it."""
    arguments = target._schema.arguments
    info = arguments[0].alias_info if arguments else None
    name = str(target._schema.name)
    return info is not None and info.is_write and name.endswith("_") and not name.endswith("__")


def is_view(target: OpOverload) -> bool:
    """Whether the result is a view of the first argument."""
    arguments = target._schema.arguments
    info = arguments[0].alias_info if arguments else None
    return info is not None and not info.is_write


def functional(target: OpOverload) -> OpOverload:
    """`aten.relu.default` of `aten.relu_.default`; the operator itself when it writes nothing."""
    if not is_in_place(target):
        return target
    packet = getattr(torch.ops.aten, base_name(target))
    overload: OpOverload = getattr(packet, target._overloadname)
    return overload


def arguments_by_name(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the operator under its name in the schema, defaults filled in."""
    named = {}
    for index, argument in enumerate(call.target._schema.arguments):
        if index < len(args):
            named[argument.name] = args[index]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named


def run(target: OpOverload, named: Mapping[str, Any]) -> Any:
    """Call an operator with its arguments by name."""
    positional = [named[argument.name] for argument in target._schema.arguments if not argument.kwarg_only]
    keywords = {argument.name: named[argument.name] for argument in target._schema.arguments if argument.kwarg_only}
    return target(*positional, **keywords)


def loop(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator once for every learner, as it was exported: right for everything, fast for nothing."""
    # Only buffers are written where they lie: a learner's part is a view, and its neighbours' share its version.
    call = replace(call, may_write=call.must_write)
    results = []
    for learner in range(call.num_learners):
        own = [of_learner(argument, learner, call.num_learners) for argument in args]
        named = {name: of_learner(value, learner, call.num_learners) for name, value in kwargs.items()}
        if is_view(call.target):  # what is a view of one learner's tensor need not be one of its part of all
            own[0] = own[0].contiguous()
        with OwnDraws(call.generators[learner]) if call.draws else nullcontext():
            results.append(call.perform(own, named))
    return args[0] if call.must_write else stacked_results(results)
