"""Which models are of one architecture, so that they can be the rows of one bank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_EVERY_MODULES = frozenset(vars(nn.Module()))  # weights, children and hooks: none of a module's own settings
_ONLY_IN_TRAINING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def same_architecture(models: Sequence[nn.Module]) -> list[list[int]]:
    """The positions of models that predict by one and the same program on weights of their own, group by group.

    Models that keep settings in objects which cannot be compared are in groups of their own.
    """
    groups: list[list[int]] = []
    for position, model in enumerate(models):
        group = next((group for group in groups if _alike(models[group[0]], model)), None)
        if group is None:
            groups.append([position])
        else:
            group.append(position)
    return groups


def _alike(model: nn.Module, other: nn.Module) -> bool:
    own, others = (list(each.named_modules(remove_duplicate=False)) for each in (model, other))
    if len(own) != len(others) or _tensors(model) != _tensors(other):
        return False
    pairs = zip(own, others, strict=True)
    return all(mine == theirs and _alike_alone(module, second) for (mine, module), (theirs, second) in pairs)


def _tensors(model: nn.Module) -> list[Any]:
    """Of every parameter and buffer its name, shape and format, and which it is: tied ones have several names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, int] = {}
    return [(name, tuple(value.shape), value.dtype, first.setdefault(id(value), len(first))) for name, value in named]


def _alike_alone(module: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are of one class with the same settings, whatever their children are."""
    if type(module) is not type(other) or _has_hooks(module) or _has_hooks(other):
        return False
    if isinstance(module, _ONLY_IN_TRAINING):
        return True
    own, others = _settings(module), _settings(other)
    return own.keys() == others.keys() and all(_equal(own[name], others[name]) for name in own)


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _EVERY_MODULES}


def _has_hooks(module: nn.Module) -> bool:
    """Hooks are functions, and a bank's modules would all call those of its first model."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    return isinstance(value, str | bytes | int | float | complex | set | frozenset | torch.dtype) and value == other
