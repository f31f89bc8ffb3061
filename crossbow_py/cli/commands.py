"""The commands by name, for what needs all of them and lies below them: completion, and jobs in other processes.

Importing them where this file is imported would be a circle, so they are looked up here when they are needed, and
nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a job that another process holds must begin at once
    from crossbow_py.cli.configuration import CommandConfig

CONFIGURED = ("train", "search", "estimate", "predict", "check")  # those with keys


def configuration_of(command: str) -> type[CommandConfig]:
    """Return the configuration class of a command: NameConfig in `crossbow_py.name.config`."""
    module = importlib.import_module(f"crossbow_py.{command}.config")
    kind: type[CommandConfig] = getattr(module, f"{command.capitalize()}Config")
    return kind


def run_command(command: str, words: Sequence[str]) -> int:
    """Run a command in this process, as `python -m crossbow_py.command` does. Return its exit code."""
    return int(importlib.import_module(f"crossbow_py.{command}.__main__").main(words))
