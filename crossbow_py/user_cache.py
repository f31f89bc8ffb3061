"""Where things are kept that only cost time when lost: compiled code, and choices that were measured."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`crossbow_py` in `$XDG_CACHE_HOME` or `~/.cache`; it need not exist. Raises OSError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"there is no home folder ({error})") from error
    return folder / "crossbow_py"
