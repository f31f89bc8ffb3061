"""The user's own model: any importable callable that returns an `nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.core.targets import call_target
from crossbow_py.models.base import ModelSettings


@dataclass(frozen=True)
class CustomModel(ModelSettings):
    """Calls `target(**args)`; a class derived from `nn.Module` is as good a target as a function that returns one."""

    NAME = "custom"

    target: str = setting("", "dotted name of a function or class that returns an nn.Module: package.module.name")
    args: dict[str, Any] = setting({}, "keyword arguments of the target")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build the module by calling the target. Its shapes are checked on the first batch.

        Raises:
            UserError: the target cannot be imported, cannot be called, fails, or returns something else.
        """
        model = call_target("model", self.target, self.args)
        if not isinstance(model, nn.Module):
            rule = f"model.target={self.target} must return a torch.nn.Module"
            raise UserError(f"{rule}, got {type(model).__name__}; return the model itself.")
        return model
