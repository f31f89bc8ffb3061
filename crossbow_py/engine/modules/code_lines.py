"""Lines of a model's code, for messages: the innermost line outside torch and this package."""

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
    """Return ` in net.py, line 7: y[:, 0].mul_(2)` for an exported node; "" if unknown."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return _last([(found["file"], int(found["line"]), found["code"]) for found in frames])


def line_of_failure(error: BaseException) -> str:
    """Return the line of the model's forward that an exception passed through, as `line_of` does."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def line_of_call(frame: FrameType) -> str:
    """Return `net.py:7`, the line that a running function was called from; "its forward" if unknown."""
    for summary in reversed(traceback.extract_stack(frame)):
        if not summary.filename.startswith((*_OURS, "<")):
            return f"{Path(summary.filename).name}:{summary.lineno}"
    return "its forward"


def _last(frames: list[tuple[str, int, str]]) -> str:
    for file, line, code in reversed(frames):
        if code and not file.startswith((*_OURS, "<")):
            return f" in {Path(file).name}, line {line}: {code.strip()[:_LONGEST]}"
    return ""
