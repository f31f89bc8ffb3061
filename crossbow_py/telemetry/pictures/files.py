"""Pictures in files. They are drawn by matplotlib, an extra, which whoever draws imports only then."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from crossbow_py.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL_MATPLOTLIB = "matplotlib is not there; pip install matplotlib."


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def plain(text: str) -> str:
    """Return text for matplotlib, which takes dollars for formulas, and leaves out what begins with an underscore."""
    escaped = text.replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{escaped}" if escaped.startswith("_") else escaped


def save_picture(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Write a PNG, whole or not at all. Raises OSError."""
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format="png")
