"""Folders of runs as a run's own listeners write them, without any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import write_yaml
from crossbow_py.cli.configuration import compose
from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.events import LearnerCount
from crossbow_py.telemetry.records import CONFIG_FILE, file_listeners
from crossbow_py.telemetry.timeline import TRACE_FILE, Timeline
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests.unit.telemetry.conftest import Events

MS = 1_000_000  # in nanoseconds


def write_run(
    folder: Path,
    *overrides: str,
    epochs: int = 3,
    summary: dict[str, Any] | None = None,
    class_counts: ClassCounts | None = None,
) -> Path:
    """A run of two learners that ended, with a decision of the auto-tuner after its first epoch."""
    classes = {} if class_counts is None else {"per_class": class_counts.figures()}
    _begin(folder, overrides, epochs, {**classes, **(summary or {})}, class_counts)
    return folder


def write_unfinished(
    folder: Path, *overrides: str, epochs: int = 3, class_counts: ClassCounts | None = None
) -> Path:
    """One that was killed."""
    _begin(folder, overrides, epochs, None, class_counts)
    return folder


def _begin(
    folder: Path,
    overrides: tuple[str, ...],
    epochs: int,
    summary: dict[str, Any] | None,
    class_counts: ClassCounts | None = None,
) -> None:
    folder.mkdir(parents=True)
    plain = config_to_mapping(compose(["+experiment=digits", *overrides], TrainConfig))
    (folder / CONFIG_FILE).write_text(write_yaml(plain), encoding="utf-8")
    listeners = file_listeners(folder, None)
    for listener in listeners:
        listener.on_start(Events.run_info())
        for epoch in range(1, epochs + 1):
            listener.on_progress(Events.progress(epoch * 1000 - 500))
            listener.on_epoch(Events.epoch_record(epoch, test_accuracy=0.5 + epoch / 10))
            if epoch == 1:
                listener.on_learner_count(LearnerCount("grow", 2, "1 → 2 learners: 250 images/s with 1.", 1000, 4.0))
        if class_counts is not None:
            listener.on_class_counts(class_counts, "test", 1000 * epochs)
        if summary is not None:
            listener.on_end(Events.summary(**summary))
        listener.close()


def write_trace(folder: Path, rounds: int = 6) -> None:
    """Two learners whose rounds take 10 ms; averaging overlaps the next round. The first round takes ten times that."""
    timeline, begin = Timeline(), 0
    for index in range(rounds):
        length = 100 * MS if index == 0 else 10 * MS
        for learner in range(2):
            row, learned = f"learner {learner}", begin + length * 8 // 10
            timeline.add("learning", row, begin, learned, {"round": index})
            timeline.add("correction", row, learned, begin + length, {"round": index})
        timeline.add("averaging", "averaging", begin + length, begin + length + 2 * MS, {"round": index})
        begin += length
    timeline.write(folder / TRACE_FILE)
