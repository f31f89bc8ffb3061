"""The table on the first page: the figures that say most, each from the results file of its question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.tables.markdown import markdown_table

NAME = "headline"
_HEADER = ["", "crossbow_py", "one tuned model", "PyTorch's default loop", "n", "cores"]


def table(rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(_HEADER, rows)


def cores(result: Mapping[str, Any]) -> str:
    """The number of cores, and whether they multiply bfloat16."""
    facts = result["machine"]
    fast = any("bf16" in flag for flag in facts["flags"])
    return f"{facts['cores']}{' (bf16)' if fast else ''}"
