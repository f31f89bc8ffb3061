"""Paths as the user gives them, from Python and on command lines."""

from __future__ import annotations

import os
from pathlib import Path

from crossbow_py.core.errors import UserError

_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, as Linux and its file systems have it
_LONGEST_SHOWN = 40


def given_path(key: str, given: str | Path) -> Path:
    """The path that `key` was given, with `~` as the home folder; whether it is there, nobody has looked.

    Raises UserError for what would fail wherever the path is used, and not as a file that is missing.
    """
    path = str(given)
    shown = f"{path[:_LONGEST_SHOWN]}..." if len(path) > _LONGEST_SHOWN else path
    if "\0" in path:
        raise UserError(f"{key} must be a path, got {path!r}, which has a null character; leave it out.")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={shown} is in the home folder of an unknown user; write the whole path.") from error
    names = [os.fsencode(path), *map(os.fsencode, expanded.parts)]
    if len(names[0]) > _LONGEST_PATH or max(map(len, names[1:]), default=0) > _LONGEST_NAME:
        raise UserError(
            f"{key} must have names of at most {_LONGEST_NAME} bytes and {_LONGEST_PATH} in all, got {shown!r}; "
            "choose a shorter one."
        )
    return expanded
