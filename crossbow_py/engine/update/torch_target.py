"""Classes of optimizers that the user names, such as torch.optim.RMSprop: which can train learners, and how."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import shown
from crossbow_py.core.targets import import_target

_KEY = "optimizer.target"
_OWN = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "groups"}  # arguments that keys are for


@dataclass(frozen=True)
class Facts:
    """The findings of one trial step of an optimizer: its states of a parameter's shape, and use of weight decay."""

    num_states: int
    decays: bool


def path_of(target: str | type) -> str:
    """Return the dotted path of a target."""
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"


def optimizer_class(target: str | type) -> type[torch.optim.Optimizer]:
    """Return the class that a target is or names. Raises UserError for what cannot step learners."""
    if not target:
        raise UserError(f"{_KEY} must name an optimizer, got none; set {_KEY}=torch.optim.RMSprop, say.")
    path = path_of(target)
    found: Any = import_target(_KEY, target) if isinstance(target, str) else target
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise UserError(
            f"{_KEY} must be a class derived from torch.optim.Optimizer, got {path}; name one, such as "
            "torch.optim.RMSprop."
        )
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{_KEY}={path} calls a closure several times a step, and a round has one gradient; choose another."
        )
    if issubclass(found, torch.optim.SparseAdam):
        raise UserError(
            f"{_KEY}={path} takes sparse gradients, and those of learners are dense; take torch.optim.Adam."
        )
    return found


def made(
    target: str | type, groups: list[dict[str, Any]], rate: float, args: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer of groups of parameters. Raises UserError if it does not take them or its arguments."""
    for name, key in _OWN.items():
        if name in args:
            raise UserError(f"optimizer.args has {name}, for which there is optimizer.{key}; leave it out.")
    found: Any = optimizer_class(target)
    try:
        made: torch.optim.Optimizer = found(groups, lr=rate, **args)
    except Exception as error:
        raise UserError(
            f"{_KEY}={path_of(target)} with optimizer.args={shown(dict(args))} cannot be made ({one_line(error)}); "
            "correct optimizer.args, or choose another."
        ) from error
    return made


def _kept_outside(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what an optimizer's own attributes are, as text, but for what torch's base class keeps."""
    known = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)), "state", "param_groups"}
    return {name: repr(value) for name, value in vars(optimizer).items() if name not in known}


def facts(target: str | type, rate: float, args: Mapping[str, Any]) -> Facts:
    """Return what a step of a small parameter shows. Raises UserError if it fails."""
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.full((3, 2), 0.1)
    optimizer = made(target, [{"params": [parameter]}], rate, args)
    before = _kept_outside(optimizer)
    try:
        with torch.no_grad():
            optimizer.step()
    except Exception as error:
        raise UserError(
            f"{_KEY}={path_of(target)} cannot take a step ({one_line(error)}); correct optimizer.args, or choose "
            "another."
        ) from error
    if "lr" not in optimizer.param_groups[0]:
        raise UserError(
            f"{_KEY}={path_of(target)} has no lr in its param_groups, which the schedule sets; let it read its "
            "rate from there."
        )
    after = _kept_outside(optimizer)
    if changed := [name for name, value in after.items() if before.get(name) != value]:
        raise UserError(
            f"{_KEY}={path_of(target)} keeps its {changed[0]} outside of its state, which checkpoints would miss; "
            "keep it in self.state[parameter]."
        )
    kept = pytree.tree_leaves([dict(optimizer.state[parameter]), *optimizer.param_groups])
    for value in kept:
        if not isinstance(value, Tensor | int | float | str | None):
            raise UserError(
                f"{_KEY}={path_of(target)} keeps a {type(value).__name__}, which checkpoints cannot hold; let it keep "
                "tensors, numbers and text."
            )
    states = pytree.tree_leaves(dict(optimizer.state[parameter]))
    num_states = sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in states)
    return Facts(num_states, "weight_decay" in optimizer.param_groups[0])
