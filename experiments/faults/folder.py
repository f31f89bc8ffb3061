"""A run's folder after a kill: how far the checkpoint was that was being written, and which are whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from crossbow_py.core.errors import CheckpointError
from crossbow_py.train.checkpoints.checkpoint import FOLDER, MANIFEST, checkpoints, open_checkpoint, part_name

# In the order in which a checkpoint goes through them.
WRITING = "parts being written"
PARTS = "parts there, no manifest"
MANIFEST_THERE = "manifest there, not renamed"
RENAMED = "renamed, older ones there"
DROPPING = "older one being dropped"
BETWEEN = "between checkpoints"
PHASES = (WRITING, PARTS, MANIFEST_THERE, RENAMED, DROPPING, BETWEEN)

_RESUMES = re.compile(r"^resuming from \S*samples-(\d+) at ", re.MULTILINE)
_STARTS = re.compile(r"^writing to ", re.MULTILINE)

Seen = frozenset[tuple[str, int]]


def hidden(run: Path) -> Seen:
    """Folders that are no checkpoints, or not any more: their names and inodes."""
    return frozenset(_hidden(run / FOLDER))


def _hidden(folder: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".samples-"):
                yield entry.name, entry.inode()


def phase(run: Path, leftovers: Seen, num_ranks: int, keep: int) -> str:
    """At which point of a checkpoint this start was killed; `leftovers` were hidden there before it."""
    own = hidden(run) - leftovers
    partial = [name for name, _ in own if name.endswith(".partial")]
    if partial:
        folder = run / FOLDER / max(partial)
        if (folder / MANIFEST).exists():
            return MANIFEST_THERE
        whole = all((folder / part_name(rank)).exists() for rank in range(num_ranks))
        return PARTS if whole else WRITING
    if own:
        return DROPPING
    return RENAMED if len(checkpoints(run)) > keep else BETWEEN


def look_at(run: Path) -> tuple[int | None, list[str]]:
    """Samples of the newest whole checkpoint, None without; and what is wrong with those that are listed."""
    newest, problems = None, []
    for folder in checkpoints(run):
        try:
            saved = open_checkpoint(folder)
            for rank in range(saved.num_ranks):
                saved.part(rank)
            newest = saved.samples_seen if newest is None else newest
        except CheckpointError as error:
            problems.append(str(error))
    return newest, problems


def resumed_from(run_log: str) -> list[int | None]:
    """Samples of the checkpoint each start has gone on from, by what it says; None for one that started afresh."""
    said = _STARTS.split(run_log)[1:]
    found = (_RESUMES.search(text) for text in said)
    return [None if match is None else int(match[1]) for match in found]
