"""The line of a model's code that something comes from, for messages: the innermost outside torch and this package."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch.fx import Node

from crossbow_py.core.version import PACKAGE

_OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, PACKAGE))
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in .*\n    (?P<code>.+)$', re.MULTILINE)
_LONGEST = 80


def line_of(node: Node) -> str:
    """` in net.py, line 7: y[:, 0].mul_(2)` of an exported node; nothing where that is not known."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return _last([(found["file"], int(found["line"]), found["code"]) for found in frames])


def line_of_failure(error: BaseException) -> str:
    """The line of the model's forward that an exception passed, as `line_of` has it."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def place_of_call(frame: FrameType) -> str:
    """`net.py:7`, the line that a function which runs was called from; "its forward" where that is not known."""
    for summary in reversed(traceback.extract_stack(frame)):
        if not summary.filename.startswith((*_OURS, "<")):
            return f"{Path(summary.filename).name}:{summary.lineno}"
    return "its forward"


def _last(frames: list[tuple[str, int, str]]) -> str:
    for file, line, code in reversed(frames):
        if code and not file.startswith((*_OURS, "<")):
            return f" in {Path(file).name}, line {line}: {code.strip()[:_LONGEST]}"
    return ""
