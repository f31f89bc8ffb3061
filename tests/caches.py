"""Caches of tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crossbow_py.core.measured import user_cache
from crossbow_py.engine.trust import Outcome, RememberedOutcomes
from crossbow_py.train.ladder.rungs import RUNGS


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


def trust_cuda(patch: pytest.MonkeyPatch, *failed: str) -> None:
    """Every rung has passed on the CUDA device, as far as the cache of now knows, but for those named."""
    patch.setattr(RememberedOutcomes, "_OWN", {})
    outcomes = {
        rung.name: Outcome("failed", "numbers differ", proves=rung.proves)
        if rung.name in failed
        else Outcome("passed", proves=rung.proves)
        for rung in RUNGS
    }
    RememberedOutcomes().keep(torch.device("cuda"), outcomes)
