"""The version, and where the package lies; on its own so that everything may import it."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parents[1]
