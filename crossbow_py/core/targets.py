"""Functions and classes that the command line names by a dotted path: `model.target`, `data.target`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crossbow_py.core.errors import UserError, is_users_code, one_line

_SPELLING = "check the spelling, and that its folder is on PYTHONPATH"


def import_target(key: str, path: str) -> Callable[..., Any]:
    """Import the callable at `package.module.name`. The current folder is searched too, after all others.

    Raises UserError with the configuration key if it cannot be imported or is not callable.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise UserError(f"{key} must be a dotted path such as package.module.function, got {path!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = None
    try:
        module = importlib.import_module(module_name)
        target = getattr(module, name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        remedy = _SPELLING if module is not None else _importing(error, module_name)
        raise UserError(f"{key}={path} cannot be imported ({one_line(error)}); {remedy}.") from error
    if not callable(target):
        raise UserError(f"{key}={path} must be callable, got {type(target).__name__}; name a function or a class.")
    called: Callable[..., Any] = target
    return called


def call_target(key: str, path: str, arguments: dict[str, Any]) -> Any:
    """Import and call a target. Raises UserError if it raises."""
    target = import_target(f"{key}.target", path)
    try:
        return target(**arguments)
    except UserError:
        raise
    except Exception as error:
        remedy = installing(error) or f"correct {key}.args or the target"
        raise UserError(
            f"{key}.target={path} called with {key}.args={arguments} failed with {one_line(error)}; {remedy}."
        ) from error


def installing(error: Exception) -> str | None:
    """Return the remedy for a module that was not found, None for another error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    return f"{_package_of(error.name)}, or put its folder on PYTHONPATH"


def _importing(error: Exception, module: str) -> str:
    """Return the remedy for an error of importing a module."""
    top, missing = module.partition(".")[0], isinstance(error, ModuleNotFoundError) and error.name
    if missing == top:
        return f"{_SPELLING}; if it is a package, {_package_of(top)}"
    if missing and f"{module}.".startswith(f"{missing}."):
        return _SPELLING
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.origin and not is_users_code(spec.origin):
        return f"install a release of {top} that fits torch {version('torch')} and the other packages"
    return installing(error) or f"correct {module}, or what it imports"


def _package_of(module: str) -> str:
    """Return what to do for a module. Nobody knows what pip would fetch by its name."""
    return f"install the package that has {module.partition('.')[0]}, in a release that fits torch {version('torch')}"
