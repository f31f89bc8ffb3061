"""Frozen parts of a model: no parameter is trained, and normalisation keeps its running statistics."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def frozen(module: M) -> M:
    """Freeze a module in place, and return it: a backbone whose features stay as they are.

    Its parameters are not trained, and its layers with running statistics, such as BatchNorm, stay in evaluation mode
    whatever mode the model is set to. Dropout goes by the model's mode. To freeze BatchNorm's parameters but not its
    statistics, call `module.requires_grad_(False)` alone.
    """
    for layer in module.requires_grad_(False).modules():
        if "running_mean" in layer._buffers and not isinstance(layer, _Still):
            # A class rather than an attribute: copies of the model, which every learner has, keep it.
            layer.__class__ = _still(type(layer))
            layer.eval()
    return module


class _Still(nn.Module):
    """A layer that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the layer's own class, as this one is made at run time."""
        return _new, (type(self).__mro__[2],), self.__dict__


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _still(of: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the layer that stays in evaluation mode, one for each class of layers."""
    return _CLASSES.setdefault(of, type(of.__name__, (_Still, of), {"__module__": of.__module__}))


def _new(of: type[nn.Module]) -> nn.Module:
    layer: nn.Module = object.__new__(_still(of))
    return layer
