"""A model of the user's own: any importable callable that returns an `nn.Module`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from crossbow_py.errors import UserError
from crossbow_py.models.base import ModelSettings
from crossbow_py.settings import check, setting


@dataclass(frozen=True)
class CustomModel(ModelSettings):
    """Calls `target(**args)`; a class derived from `nn.Module` is as good a target as a function that returns one."""

    NAME: ClassVar[str] = "custom"

    target: str = setting("", "dotted name of a function or class that returns an nn.Module: package.module.name")
    args: dict[str, Any] = setting({}, "keyword arguments of the target")

    def __post_init__(self) -> None:
        check(self)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The module made by the target; shapes are the target's own business and checked on the first batch.

        Raises:
            UserError: the target cannot be imported, cannot be called, fails, or returns something else.
        """
        target = _import_target(self.target)
        try:
            model = target(**self.args)
        except Exception as error:
            raise UserError(
                f"model.target={self.target} called with model.args={self.args} failed with "
                f"{_one_line(error)}; correct model.args or the target."
            ) from error
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model.target={self.target} must return a torch.nn.Module, got {type(model).__name__}; "
                "return the model itself."
            )
        return model


def _import_target(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise UserError(f"model.target must be a dotted name such as package.module.function, got {path!r}.")
    try:
        target = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs the user's code, which may fail in any way
        raise UserError(
            f"model.target={path} cannot be imported ({_one_line(error)}); "
            "check the spelling and that its folder is on PYTHONPATH."
        ) from error
    if not callable(target):
        raise UserError(
            f"model.target={path} must be callable, got {type(target).__name__}; name a function or an nn.Module class."
        )
    called: Callable[..., Any] = target
    return called


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
