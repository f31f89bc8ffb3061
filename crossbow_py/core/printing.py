"""Printing, and tables of text. A standard stream that is closed, full or no longer read stops nothing."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Keep a command running whatever its streams do: closed ones are replaced by the null device, then flushed."""
    # Otherwise a file would get the descriptor of a closed stream, and what C prints with it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.callback(setattr, sys, name, None)
                setattr(sys, name, nowhere)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an ASCII terminal has no γ; stderr escapes it by itself
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                _flush(stream)


def print_line(text: str, stream: TextIO) -> OSError | None:
    """Print a line and flush it. Return the error if that fails, after which the stream is the null device."""
    try:
        print(text, file=stream)
    except OSError as error:
        _send_nowhere(stream)
        return error
    return _flush(stream)


def _flush(stream: TextIO) -> OSError | None:
    try:
        stream.flush()
    except OSError as error:  # the interpreter's own flush at exit would fail again
        _send_nowhere(stream)
        return error
    return None


def _send_nowhere(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # a notebook's stream has no descriptor
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the first column left-aligned and the others right-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  "
        + "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
