"""Functions and classes that settings name by a dotted path: `model.target`, `data.target`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from crossbow_py.core.digest import digest_of
from crossbow_py.core.errors import UserError, one_line


class Given:
    """A function from Python that has no dotted path; this process finds it by `path` as long as this object lives.

    The path ends with the digest of the function and of what it `holds`.
    """

    def __init__(self, what: str, function: Any, *holds: object) -> None:
        self.path, self.function = f"python.{what}_{digest_of(function, *holds)}", function
        _GIVEN[self.path] = self


_GIVEN: WeakValueDictionary[str, Given] = WeakValueDictionary()


def shown_target(path: str) -> str:
    """Return a path as messages have it: without the digest of a function from Python."""
    return path.removeprefix("python.").rpartition("_")[0] if path in _GIVEN else path


def import_target(key: str, path: str) -> Callable[..., Any]:
    """Import the callable at `package.module.name`. The current folder is searched too, after all others.

    Raises UserError with the configuration key if it cannot be imported or is not callable.
    """
    if (given := _GIVEN.get(path)) is not None:
        return given.function  # type: ignore[no-any-return]
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise UserError(f"{key} must be a dotted path such as package.module.function, got {path!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        target = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        remedy = f"correct {module_name}, and see that {_installed(error)}"
        if isinstance(error, ImportError):
            remedy = f"check the spelling, that its folder is on PYTHONPATH, and that {_installed(error)}"
        elif isinstance(error, AttributeError) and error.obj is sys.modules.get(module_name):
            remedy = "check the spelling, and that its folder is on PYTHONPATH"
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
        called = f"{key}.target={path} called with {key}.args={arguments}"
        remedy = f"correct {key}.args or the target, and see that {_installed(error)}"
        raise UserError(f"{called} failed with {one_line(error)}; {remedy}.") from error


def _installed(error: Exception) -> str:
    """Return what to see to, after an error: pip's name of a package may be another than that of its module."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{missing or 'what it imports'} is installed in a release that fits torch {version('torch')}"
