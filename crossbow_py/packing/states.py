"""Where trials stand between two segments, as files of a search's folder: whole on disk, or not there."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from pathlib import Path

import torch

from crossbow_py.errors import UserError
from crossbow_py.packing.hyperband import Segment
from crossbow_py.packing.trial import Checkpoint

_FORMAT = 1


class TrialStates:
    """Checkpoints of trials at their rungs, in `folder`/<trial>/rung_<n>.pt.

    Several processes may write there: what two write for one segment is the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """Keep where the trial stands after a segment. Raises UserError when the disk refuses."""
        path = self._path(segment)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # nobody else's
        values = {"format_version": _FORMAT, **vars(checkpoint)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.save(values, partial)
                partial.rename(path)  # not synced: what a power cut tears is not whole, and is trained again
            finally:
                partial.unlink(missing_ok=True)  # a full disk needs the room
        except (OSError, RuntimeError) as error:  # torch says RuntimeError of a full disk
            raise UserError(f"cannot write {path} ({error}); make room there, and search again.") from error

    def load(self, segment: Segment) -> Checkpoint | None:
        """Where the trial stood after a segment; None when that is not there, or not whole."""
        path = self._path(segment)
        try:
            values = torch.load(path, weights_only=True, map_location="cpu")
            if values.pop("format_version") != _FORMAT:
                return None
            return Checkpoint(**values)
        except Exception:  # whatever a torn file makes torch raise: the segment before is trained again
            return None

    def forget(self, trial: int, before_rung: int | None = None) -> None:
        """Remove what a trial left, or only what it left before a rung. Does not raise."""
        folder = self._folder / f"{trial:05}"
        if before_rung is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for rung in range(before_rung):
            with suppress(OSError):
                (folder / f"rung_{rung}.pt").unlink()

    def _path(self, segment: Segment) -> Path:
        return self._folder / f"{segment.trial:05}" / f"rung_{segment.rung}.pt"
