"""Programs that measure: they print tables, write a results file, and draw its picture beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.core.errors import UserError
from experiments.bench.machine import machine
from experiments.bench.results import read_result, show_and_write


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
