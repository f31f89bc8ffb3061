"""Markdown tables that also read well in a terminal, and the marked blocks of a page that hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NONE = "–"  # where there is no value to show
_BLOCK = re.compile(r"(<!-- table:(?P<name>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- table:\S+ -->")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns, the first to the left and the others, being numbers, to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


Column = str | Callable[[Any], str]


def columns_table(records: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A row a record; by the name of each column, the key whose value it shows, or what makes its cell of a record."""
    cells = list(columns.values())
    rows = [[str(each[cell]) if isinstance(cell, str) else cell(each) for cell in cells] for each in records]
    return markdown_table(list(columns), rows)


def number_of(key: str, form: str = ",.0f") -> Column:
    """A column of a key's numbers."""
    return lambda record: number(record[key], form)


def spread_of(key: str, form: str = ".2f") -> Column:
    """A column of a key's medians with smallest and largest."""
    return lambda record: spread_text(record[key], form)


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def spread_text(spread: Mapping[str, float] | None, form: str = ".2f") -> str:
    """A median with the smallest and the largest value, as a cell of a table."""
    if spread is None:
        return NONE
    median, least, most = (format(spread[key], form) for key in ("median", "minimum", "maximum"))
    return f"{median} ({least}–{most})"


def replace_blocks(text: str, build: Callable[[str], str]) -> str:
    """`text` with whatever stands between `<!-- table:NAME -->` and `<!-- end -->` replaced by `build(NAME)`.

    Raises:
        ValueError: a block has no end.
    """
    if len(_MARKER.findall(text)) != len(_BLOCK.findall(text)):
        raise ValueError("a <!-- table:NAME --> has no <!-- end --> of its own on a later line; add it.")

    def replaced(block: re.Match[str]) -> str:
        table = build(block["name"])
        return f"{block[1]}{table}\n{block[3]}" if table else f"{block[1]}{block[3]}"

    return _BLOCK.sub(replaced, text)


def cores(result: Mapping[str, Any]) -> str:
    """The number of cores, and whether they multiply bfloat16."""
    facts = result["machine"]
    fast = any("bf16" in flag for flag in facts["flags"])
    return f"{facts['cores']}{' (bf16)' if fast else ''}"


def texts_of_kind(kind: str, text: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    """Make the table over all results that is a text of each of a kind; empty while there is none."""
    return lambda results: "\n\n".join(text(each) for each in results.values() if each.get("kind") == kind)
