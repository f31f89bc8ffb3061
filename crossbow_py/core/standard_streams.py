"""A process's standard streams: that one is closed, full or read by nobody any more is no reason to stop or crash."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Around all that a command does: streams that were closed go nowhere, and so does what is left in a buffer."""
    _fill_gaps()
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.callback(setattr, sys, name, None)
                setattr(sys, name, nowhere)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII has no γ; stderr escapes it by itself
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                _flush(stream)


def print_line(text: str, stream: TextIO) -> OSError | None:
    """Print a line at once, or return why not; from then on the stream goes nowhere."""
    try:
        print(text, file=stream)
    except OSError as error:
        _send_nowhere(stream)
        return error
    return _flush(stream)


def _flush(stream: TextIO) -> OSError | None:
    try:
        stream.flush()
    except OSError as error:  # the interpreter's own flush at its end would fail again
        _send_nowhere(stream)
        return error
    return None


def _fill_gaps() -> None:
    """Give descriptors of closed streams to the null device: else files would take them, and what is printed by C."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _send_nowhere(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # it has none, as in a notebook
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
