"""Caches of tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.core.measured import user_cache


def use_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Remember in `folder` from now on; native code, which takes a second to compile, stays where it is."""
    link_native(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder))


def link_native(folder: Path) -> None:
    """What is a `$XDG_CACHE_HOME` or `~/.cache` later has the native code that the cache of now has."""
    compiled, link = user_cache() / "native", folder / "crossbow_py" / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True)
    link.symlink_to(compiled)
