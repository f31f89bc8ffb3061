"""Draws a results file right after it was measured, where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path


def draw_after(question: str, path: Path) -> None:
    """Draw a results file of a question, beside it; matplotlib is an extra."""
    try:
        from experiments.tables.pictures import draw_beside  # noqa: PLC0415
    except ImportError as error:
        print(f"no picture: {error}; pip install '.[plots]', then python experiments/tables --pictures {question}")
        return
    draw_beside(question, path, json.loads(path.read_text()))
