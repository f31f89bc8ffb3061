"""Groups of parameters, by name, with settings of their own: other rates and weight decay, clipped apart, or frozen."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, from_mapping, setting, shown, suggestion


@dataclass(frozen=True)
class ParameterGroup:
    """The settings of the parameters whose names match.

    A name matches a pattern of the shell, as `*.bias`, or the name of a module that it is in, as `head` and `layers.0`.
    """

    GROUP: ClassVar[str] = "optimizer.groups"

    names: str = setting("", "a pattern of names, or a module")
    rate: float = setting(1.0, "times the learning rate of other parameters, under the same schedule", minimum=0)
    weight_decay: float | None = setting(None, "λ of the group; null is that of other parameters", minimum=0)
    clip_norm: float | None = setting(
        None, "largest norm of the group's own gradient; null clips it with other parameters", above=0
    )
    frozen: bool = setting(False, "leave the parameters as they are")

    def __post_init__(self) -> None:
        check(self)
        if not self.names:
            raise UserError("a group of optimizer.groups has no names; give a pattern or a module: {names: head.*}.")
        if self.frozen and self.acts:
            raise UserError(
                f"optimizer.groups: {self.names} is frozen, so it has no rate, weight_decay or clip_norm; leave them "
                "out, or set frozen=false."
            )

    @property
    def acts(self) -> bool:
        """Whether its parameters take other steps."""
        return self.rate != 1 or self.weight_decay is not None or self.clip_norm is not None

    def matches(self, name: str) -> bool:
        """Return whether a parameter's name matches."""
        return fnmatch.fnmatchcase(name, self.names) or name.startswith(f"{self.names}.")


def as_groups(given: Any) -> tuple[ParameterGroup, ...]:
    """Return groups that were given as such or as mappings. Raises UserError."""
    if not isinstance(given, Sequence) or not all(isinstance(each, ParameterGroup | Mapping) for each in given):
        raise UserError(
            f"optimizer.groups must be a list of mappings, got {shown(given)}; write [{{names: head.*, rate: 10}}]."
        )
    return tuple(
        each if isinstance(each, ParameterGroup) else from_mapping(ParameterGroup, each, ParameterGroup.GROUP)
        for each in given
    )


def group_numbers(groups: Sequence[ParameterGroup], module: nn.Module) -> dict[str, int]:
    """Return each parameter's group, from 1 on: the first that matches, or 0 for none.

    Raises UserError for a group without any parameter.
    """
    names = [name for name, _ in module.named_parameters()]
    found = {name: next((n for n, own in enumerate(groups, 1) if own.matches(name)), 0) for name in names}
    for number, group in enumerate(groups, 1):
        if number in found.values():
            continue
        if any(map(group.matches, names)):
            raise UserError(
                f"optimizer.groups: {group.names} matches only parameters that groups before it have; put it before "
                "them, as the first that matches is taken."
            )
        near = suggestion(group.names, {name.partition(".")[0] for name in names} | set(names))
        if "did you mean" not in near:
            near = suggestion("", {name.partition(".")[0] for name in names})
        raise UserError(f"optimizer.groups: {group.names} matches no parameter of the model{near}")
    return found


def freeze(groups: Sequence[ParameterGroup], module: nn.Module) -> None:
    """Set `requires_grad` to False for parameters of frozen groups. Raises UserError if nothing is left to train."""
    numbers = group_numbers(groups, module)
    for name, parameter in module.named_parameters():
        if numbers[name] and groups[numbers[name] - 1].frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("optimizer.groups freezes all parameters of the model; leave some to train.")
