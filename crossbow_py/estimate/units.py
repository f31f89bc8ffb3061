"""Amounts of memory as text: parsed from settings, and written for people."""

from __future__ import annotations

import math
import re

from crossbow_py.core.errors import UserError

_UNITS = {"": 1, "b": 1, **{f"{letter}{kind}": base**power for kind, base in (("b", 1000), ("ib", 1024))
                            for power, letter in enumerate("kmgt", start=1)}}  # fmt: skip
_AMOUNT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(key: str, value: str | float) -> int:
    """Return the bytes of `8GiB`, `500MB` or `16e9`. Raises UserError for anything else, and for less than a byte."""
    found = _AMOUNT.fullmatch(str(value))
    unit = _UNITS.get(found[2].lower()) if found else None
    try:
        amount = float(found[1]) * unit if found and unit else 0.0
    except ValueError:
        amount = 0.0
    if not 1 <= amount < math.inf:
        raise UserError(f"{key} must be an amount of memory above 0, such as 16GiB, 500MB or 8e9, got {value!r}.")
    return int(amount)


def in_words(size: float) -> str:
    """Return an amount of memory with three digits, such as `1.50 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            value = size / scale
            return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f} {unit}"
    return f"{size:.0f} B"
