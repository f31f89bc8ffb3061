"""The registry of rules that run operators for K learners, and the arguments of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from crossbow_py.engine.fusion.values import Fused, channels, of_learner, stack, stacked_results
from crossbow_py.engine.modules.dropout import OwnDraws


class NotFusedError(Exception):
    """A rule does not cover these arguments, so the operator runs learner by learner."""


@dataclass(frozen=True)
class Call:
    """An operator of the graph, for K learners.

    Attributes:
        target: the ATen operator as it was exported.
        shape: the shape of one learner's result; None if that is no tensor.
        generators: each learner's generator of random numbers.
        dropout_rates: each learner's own dropout rate, or None for that of the operator; read in every run.
        learners: the K learners, which index these rates.
        may_write: whether an in-place operator may overwrite the memory of its first argument.
        must_write: whether it has to, because it changes a buffer, which outlives the run.
    """

    target: OpOverload
    shape: tuple[int, ...] | None
    generators: list[torch.Generator]
    dropout_rates: Sequence[float | None]
    learners: range
    may_write: bool = False
    must_write: bool = False

    @property
    def num_learners(self) -> int:
        """K."""
        return len(self.learners)

    def stack(self, value: Fused) -> Tensor:
        """Return a value `[K, *shape]`, a view."""
        return stack(value, len(self.learners))

    def channels(self, value: Fused) -> Tensor:
        """Return a value `[B, C, ...]` as `[B, K·C, ...]`."""
        return channels(value, len(self.learners))

    @property
    def draws(self) -> bool:
        """True if the operator may draw from the learners' generators; on CUDA the loop draws from torch's own."""
        seeded = torch.Tag.nondeterministic_seeded in self.target.tags
        return seeded and self.generators[0].device.type == "cpu"

    @property
    def functional(self) -> OpOverload:
        """The operator that writes nothing, such as `aten.relu.default` for `aten.relu_.default`."""
        if not is_in_place(self.target):
            return self.target
        overload: OpOverload = getattr(getattr(torch.ops.aten, base_name(self.target)), self.target._overloadname)
        return overload

    def perform(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator's result; an in-place operator that may not overwrite works on a copy."""
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
    """Return the operator's name without overload or underscore, such as `relu` for `aten.relu_.default`."""
    name = str(target._schema.name).split("::")[1]
    return name.removesuffix("_") if is_in_place(target) else name


def is_in_place(target: OpOverload) -> bool:
    """Return whether the operator writes its first argument and returns it."""
    arguments = target._schema.arguments
    info = arguments[0].alias_info if arguments else None
    name = str(target._schema.name)
    return info is not None and info.is_write and name.endswith("_") and not name.endswith("__")


def arguments_by_name(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of the operator by its name in the schema, with defaults."""
    return {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(call.target._schema.arguments)
    }


def run(target: OpOverload, named: Mapping[str, Any]) -> Any:
    """Call an operator with its arguments by name."""
    positional = [named[argument.name] for argument in target._schema.arguments if not argument.kwarg_only]
    keywords = {argument.name: named[argument.name] for argument in target._schema.arguments if argument.kwarg_only}
    return target(*positional, **keywords)


def loop(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the operator once for every learner, as it was exported: always right, and slow."""
    # Only buffers are written in place: a learner's part is a view, which shares its version with the others'.
    call = replace(call, may_write=call.must_write)
    results, arguments = [], call.target._schema.arguments
    info = arguments[0].alias_info if arguments else None
    for learner in range(call.num_learners):
        own = [of_learner(argument, learner, call.num_learners) for argument in args]
        named = {name: of_learner(value, learner, call.num_learners) for name, value in kwargs.items()}
        if info is not None and not info.is_write:  # a part of a stack may lack the strides that a view needs
            own[0] = own[0].contiguous()
        with OwnDraws(call.generators[learner]) if call.draws else nullcontext():
            results.append(call.perform(own, named))
    return args[0] if call.must_write else stacked_results(results)
