"""What a command called in process says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

import pytest


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def called(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        return main(arguments), said.getvalue()
