"""The user's cache: compiled code and measured choices, which only cost time when they are lost."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from crossbow_py.core.files import read_text, replacing

_MAX_KEPT = 5_000  # a few hundred layers of a few networks, forward and backward


def user_cache() -> Path:
    """Return the folder `crossbow_py` in `$XDG_CACHE_HOME` or `~/.cache`, which need not exist.

    Raises OSError for a user without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"there is no home folder ({error})") from error
    return folder / "crossbow_py"


class Remembered:
    """Choices of earlier runs, kept in one small file. A file that cannot be read or written is ignored."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self._name, self._given = name, path

    @property
    def path(self) -> Path:
        """The file. Raises OSError for a user without a home."""
        return self._given or user_cache() / self._name

    def recall(self, key: str) -> str | None:
        """Return the choice kept under a fingerprint, None without one."""
        return self._read().get(key)

    def remember(self, key: str, choice: str) -> None:
        """Keep a choice. The oldest ones are dropped beyond 5,000."""
        kept = {**self._read(), key: choice}
        text = json.dumps(dict(list(kept.items())[-_MAX_KEPT:]), indent=0)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial:
                partial.write_text(text)

    def _read(self) -> dict[str, str]:
        try:
            values = json.loads(read_text(self.path))
        except (OSError, ValueError, RecursionError):
            return {}
        plain = values if isinstance(values, dict) else {}
        return {str(key): value for key, value in plain.items() if isinstance(value, str)}
