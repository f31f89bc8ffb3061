"""The commands by name, for what needs all of them and lies below them: completion, and jobs in other processes.

Importing them where this file is imported would be a circle, so they are looked up here when they are needed, and
nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

CONFIGURED = ("train", "many", "search", "estimate", "predict", "check")  # those with keys


def configuration_of(command: str) -> Any:
    """Return the `CommandConfig` class of a command: NameConfig in `crossbow_py.name.config`."""
    return getattr(importlib.import_module(f"crossbow_py.{command}.config"), f"{command.capitalize()}Config")


def run_command(command: str, words: Sequence[str]) -> int:
    """Run a command in this process, as `python -m crossbow_py.command` does. Return its exit code."""
    return int(importlib.import_module(f"crossbow_py.{command}.__main__").main(words))
