"""The command lines of experiments: what all have in common, and numbers."""

from __future__ import annotations

import argparse
from pathlib import Path


def measuring_parser(doc: str | None, written: str = "write the results there") -> argparse.ArgumentParser:
    """Make the parser of a program that measures, described by the first line of its docstring, with `--json`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--json", type=Path, metavar="PATH", help=written)
    return parser


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A finite number greater than 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return number


def seeds(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; argparse turns a ValueError into its own message."""
    return tuple(int(seed) for seed in text.split(","))
