"""Programs that measure: their options, and that they print tables, write a results file, and draw its picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.core.errors import UserError
from experiments.bench.machine import machine, machine_line
from experiments.bench.results import read_result, write_result
from experiments.bench.windows import MAX_FOREIGN_SHARE


def measure_and_write(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    text: Callable[[dict[str, Any]], str],
    question: str = "",
) -> int:
    """Measure as the command line asks, print the tables, and write the results file if there is to be one.

    Args:
        parser: of a program that measures, see `measuring_parser`; it tells of the user's mistakes, with exit code 2.
        argv: the command line.
        measure: everything in the results file but the machine.
        text: the tables.
        question: whose picture is drawn beside the file, where matplotlib is installed.

    Returns the exit code.
    """
    options = parser.parse_args(argv)
    try:
        result = {"machine": machine(), **measure(options)}
    except UserError as error:
        parser.error(str(error))
    show_and_write(result, text, options.json)
    if question and options.json:
        draw_after(question, options.json)
    return 0


def draw_after(question: str, path: Path) -> None:
    """Draw a results file of a question, beside it; matplotlib is an extra."""
    try:
        from experiments.tables.pictures import draw_beside  # noqa: PLC0415
    except ImportError as error:
        print(f"no picture: {error}; pip install '.[plots]', then python experiments/tables --pictures {question}")
        return
    draw_beside(question, path, read_result(path))


def show_and_write(result: dict[str, Any], text: Callable[[dict[str, Any]], str], path: Path | None) -> None:
    """Print the tables of a result and write it; the tables are then those of the numbers in the file."""
    if path:
        write_result(path, result)
        result = read_result(path)
    print(f"\n{text(result)}\n\n{machine_line(result['machine'])}")
    if path:
        print(f"written to {path}")


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


_COMMON: dict[str, dict[str, Any]] = {
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "default %(default)s"},
    "--folder": {"default": "flowers_300",
                 "help": "the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)"},
    "--max-foreign-share": {
        "type": positive, "default": MAX_FOREIGN_SHARE,
        "help": "drop windows in which others take a larger share of the cores (default %(default)s)",
    },
}  # fmt: skip


def seeds(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; argparse turns a ValueError into its own message."""
    return tuple(int(seed) for seed in text.split(","))
