"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_events(folder: Path | str) -> EventAccumulator:
    """All of them in a folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events
