"""What searches from the command line start from."""

from __future__ import annotations

import pytest

from crossbow_py.packs import trial_registry
from crossbow_py.packs.width import Width
from crossbow_py.search import searcher
from crossbow_py.search.report.search_file import SearchFile


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a search leaves, search.json alone: the rest takes longer than tiny searches."""
    monkeypatch.setattr(searcher, "search_listeners", lambda folder, logger, speaks: [SearchFile(folder, print)])


@pytest.fixture
def packs_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs are that wide without measuring."""
    width = Width(3, {("serial", 1): 1.0, ("fused", 3): 2.0}, "Packs of 3, for a test.")
    monkeypatch.setattr(trial_registry, "measured_width", lambda *_: (width, []))
