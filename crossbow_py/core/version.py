"""The version and the folder of the package, in a module that everything may import."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parents[1]
