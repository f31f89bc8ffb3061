"""The table at the end of a sweep: a line of text a run, and how to look further."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossbow_py.core.printing import columns
from crossbow_py.telemetry.figures import MOST_RUNS, figures
from crossbow_py.telemetry.records import read_summary

_SHOWN = ("status", "test accuracy", "best validation accuracy", "time to accuracy", "time of training", "images/s")


@dataclass(frozen=True)
class _EndedRun:
    folder: Path
    status: str
    summary: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, Any]] = ()


def sweep_lines(folders: Sequence[Path]) -> list[str]:
    """A table of the runs among `folders` that have ended; nothing for fewer than two."""
    ended = [(folder, summary) for folder in folders if (summary := read_summary(folder))]
    if len(ended) < 2:
        return []
    runs = [_EndedRun(folder, str(summary.get("status")), summary) for folder, summary in ended]
    shown = [(name, values) for name, values in figures(runs) if name in _SHOWN]
    rows = [[run.folder.name, *(values[place] for _, values in shown)] for place, run in enumerate(runs)]
    parents = {run.folder.parent for run in runs}
    lines = ["", *columns(["run", *(name for name, _ in shown)], rows)]
    if len(parents) == 1 and len(runs) <= MOST_RUNS:
        lines += ["", f"compare them: python -m crossbow_py.report {shlex.quote(str(parents.pop()))}"]
    return lines
