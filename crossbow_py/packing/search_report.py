"""What a search leaves behind and shows: search.json, the console."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from crossbow_py.packing.search_events import SearchInfo, SearchListener, SearchProgress, SearchSummary
from crossbow_py.telemetry.records import write_atomically

SEARCH_FILE = "search.json"


class SearchFile(SearchListener):
    """Writes search.json."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEARCH_FILE

    def on_end(self, summary: SearchSummary) -> None:
        """See SearchListener."""
        write_atomically(self._path, json.dumps(_plain(summary), indent=1, allow_nan=False, default=str) + "\n")


class PrintedLines(SearchListener):
    """One line a message."""

    def on_start(self, info: SearchInfo) -> None:
        """See SearchListener."""
        print(info)

    def on_message(self, message: str) -> None:
        """See SearchListener."""
        print(message, flush=True)

    def on_progress(self, progress: SearchProgress) -> None:
        """See SearchListener."""
        print(len(progress.running), progress.num_finished, progress.num_segments, round(progress.images_per_s), progress.best_value, flush=True)

    def on_end(self, summary: SearchSummary) -> None:
        """See SearchListener."""
        print(summary.best, summary)


def search_listeners(folder: Path) -> list[SearchListener]:
    """Everything that records a search."""
    return [SearchFile(folder), PrintedLines()]


def _plain(summary: SearchSummary) -> dict[str, Any]:
    return dataclasses.asdict(summary)
