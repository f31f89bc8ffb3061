"""The command lines of experiments: what all have in common, and numbers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiments.bench.windows import MAX_FOREIGN_SHARE


def measuring_parser(
    doc: str | None, *common: str, written: str = "write the results there"
) -> argparse.ArgumentParser:
    """Make the parser of a program that measures: the first line of its docstring, `--json`, and some of `_COMMON`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--json", type=Path, metavar="PATH", help=written)
    for name in common:
        parser.add_argument(name, **_COMMON[name])
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


_COMMON: dict[str, dict[str, Any]] = {
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "default %(default)s"},
    "--folder": {"default": "flowers_300",
                 "help": "the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)"},
    "--max-foreign-share": {
        "type": positive, "default": MAX_FOREIGN_SHARE,
        "help": "drop windows in which others take a larger share of the cores (default %(default)s)",
    },
}  # fmt: skip
