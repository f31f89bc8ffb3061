"""The checkpoints of trials between two segments, as files of a search's folder: whole on disk, or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import own_file, replacing, sync
from crossbow_py.packs.trial import Checkpoint
from crossbow_py.search.hyperband import Segment

_FORMAT = 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Underway:
    """A trial within a segment: its checkpoint, the sum of its losses, and the seconds it took."""

    checkpoint: Checkpoint
    loss_sum: float
    num_losses: int
    seconds: float


class TrialStates:
    """Checkpoints of trials: at their rungs in `folder`/<trial>/rung_<n>.pt, on the way there in rung_<n>.underway.pt.

    Several processes may write there: what two write for the end of a segment is the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """Save where the trial stands after a segment; it is on the disk when this returns.

        Raises UserError when the disk refuses.
        """
        # Before the journal has the segment's result: nothing would train it again but from its beginning.
        self._write(self._path(segment), vars(checkpoint), synced=True)

    def load(self, segment: Segment) -> Checkpoint | None:
        """Return where the trial stood after a segment; None if the file is missing or not whole."""
        return self._read(self._path(segment), lambda values: Checkpoint(**values))

    def has(self, segment: Segment) -> bool:
        """Return whether there is something to load."""
        return self._path(segment).exists()

    def save_underway(self, segment: Segment, underway: Underway) -> None:
        """Save where the trial stands within a segment, until `forget`. Raises UserError when the disk refuses."""
        # Not synced: what a power cut tears is not whole, and the segment is trained again.
        values = {**vars(underway), "checkpoint": vars(underway.checkpoint)}
        self._write(self._underway(segment), values, synced=False)

    def load_underway(self, segment: Segment) -> Underway | None:
        """Return where the trial stood within a segment; None if the file is missing or not whole."""

        def build(values: dict[str, Any]) -> Underway:
            return Underway(**{**values, "checkpoint": Checkpoint(**values["checkpoint"])})

        return self._read(self._underway(segment), build)

    def is_underway(self, segment: Segment) -> bool:
        """Return whether there is a file on where the trial stood within a segment."""
        return self._underway(segment).exists()

    def _write(self, path: Path, values: Mapping[str, Any], *, synced: bool) -> None:
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync(self._folder)
            with replacing(path, synced=synced) as partial:
                torch.save({"format_version": _FORMAT, **values}, partial)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError of a full disk
            raise UserError(f"cannot write {path} ({error}); make room there, and search again.") from error

    def _read(self, path: Path, build: Callable[[dict[str, Any]], _T]) -> _T | None:
        try:
            with open(path, "rb", opener=own_file) as file:
                values = torch.load(file, weights_only=True, map_location="cpu")
            return build(values) if values.pop("format_version") == _FORMAT else None
        except Exception:  # whatever a torn file makes torch raise: the segment, or the one before, is trained again
            return None

    def forget(self, trial: int, before_rung: int | None = None) -> None:
        """Remove what a trial left, or only what it left before it stood at a rung. Does not raise."""
        folder = self._folder / f"{trial:05}"
        if before_rung is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        left = [self._path(Segment(trial, rung)) for rung in range(before_rung)]
        left += [self._underway(Segment(trial, rung)) for rung in range(before_rung + 1)]
        for path in left:
            with suppress(OSError):
                path.unlink()

    def _path(self, segment: Segment) -> Path:
        return self._folder / f"{segment.trial:05}" / f"rung_{segment.rung}.pt"

    def _underway(self, segment: Segment) -> Path:
        return self._path(segment).with_suffix(".underway.pt")
