"""The run's records on disk: one metrics.jsonl line per epoch, summary.json at the end, TensorBoard beside them.

Numbers that are not finite are written as null, because JSON has no value for them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow_py.core.errors import unwritable
from crossbow_py.core.files import check_own, own_file, read_text, replacing
from crossbow_py.telemetry.class_counts import ClassCounts, as_csv
from crossbow_py.telemetry.events import EpochRecord, LearnerCount, Listener, NotingListener, RunInfo, Summary
from crossbow_py.telemetry.system import SystemMonitor

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CONFUSION_FILES = {which: f"confusion_{which}.csv" for which in ("test", "validation")}
DIGESTS = "model_sha256"  # in a summary: of the files with weights, by name
CONFIG_FILE = "config.yaml"
BEST_FOLDER = "best"  # in a search's folder: its best trial, as a run's
TENSORBOARD_FOLDER = "tensorboard"


def file_listeners(
    output_dir: Path,
    resumed_samples: int | None,
    monitor: SystemMonitor | None = None,
    closed_epochs: int = 0,
    tensorboard: bool = True,
) -> list[Listener]:
    """Return the listeners that write the run's files under `output_dir`, which exists.

    Args:
        output_dir: the run's folder; its config.yaml, if there is one, is shown in TensorBoard.
        resumed_samples: samples seen at the checkpoint that the run resumes from; later records are dropped. None for
            a fresh run, which drops every earlier record.
        monitor: reads the machine, and is closed with the listeners; None makes one that reads no GPU.
        closed_epochs: epochs closed at that checkpoint, each of which has a record.
        tensorboard: whether there are TensorBoard's files.

    Raises:
        UserError: one of the files cannot be the run's own, such as a link.
    """
    config = output_dir / CONFIG_FILE
    try:
        files = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, *CONFUSION_FILES.values())
        check_own(output_dir, files, (TENSORBOARD_FOLDER,))
        text = read_text(config) if config.exists() else None
    except OSError as error:
        raise unwritable(output_dir, error) from error
    records = RunRecords(output_dir, resumed_samples, closed_epochs)
    if not tensorboard:
        return [records]
    # Imported here, as TensorBoard's modules take a fifth of a second, which importing the package should not.
    from crossbow_py.telemetry.tensorboard.listeners import TensorBoardScalars  # noqa: PLC0415

    return [
        records,
        TensorBoardScalars(
            output_dir / TENSORBOARD_FOLDER,
            resumed_samples,
            config_text=text,
            new_monitor=SystemMonitor if monitor is None else lambda: monitor,
        ),
    ]


def node_listeners(output_dir: Path, resumed_samples: int | None, monitor: SystemMonitor, name: str) -> list[Listener]:
    """Return the listeners of the first rank of a node on which rank 0 is not: a run of its own in TensorBoard.

    Raises UserError if something there cannot be the run's own, such as a link, or cannot be written.
    """
    from crossbow_py.telemetry.tensorboard.listeners import NodeScalars  # noqa: PLC0415  as above

    folder = output_dir / TENSORBOARD_FOLDER / name
    try:
        check_own(output_dir, (), (TENSORBOARD_FOLDER,))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(output_dir, error) from error
    return [NodeScalars(folder, resumed_samples, lambda: monitor)]


class RunRecords(NotingListener):
    """Appends to metrics.jsonl, writes summary.json and confusion matrices, each line or file whole or not at all."""

    def __init__(self, output_dir: Path, resumed_samples: int | None, closed_epochs: int = 0) -> None:
        self._metrics, self._summary = output_dir / METRICS_FILE, output_dir / SUMMARY_FILE
        self._confusion = {which: output_dir / name for which, name in CONFUSION_FILES.items()}
        self._resumed_samples, self._closed_epochs = resumed_samples, closed_epochs

    def on_start(self, info: RunInfo) -> None:
        """Drop records that a resumed run will write again, and an earlier summary: the run is unfinished now."""
        self._summary.unlink(missing_ok=True)
        if self._resumed_samples is None:
            for path in (self._metrics, *self._confusion.values()):
                path.unlink(missing_ok=True)
            return
        is_there = self._metrics.exists()
        lines, damaged = read_records(self._metrics) if is_there else ([], 0)
        kept = [line for line in lines if line["samples_seen"] <= self._resumed_samples]
        torn = is_there and not self._metrics.read_bytes().endswith(b"\n")  # as after a kill, which is no damage
        epochs = (line.get("epoch") for line in kept if "event" not in line)
        last_epoch = max((epoch for epoch in epochs if isinstance(epoch, int | float)), default=0)
        here = info.resumed_from and Path(info.resumed_from).resolve().is_relative_to(self._metrics.parent.resolve())
        if here and (damaged > torn or last_epoch < self._closed_epochs):
            self._notes += (
                f"{self._metrics} is damaged or has lost lines of earlier epochs; what can be read of them is kept "
                f"(lines: {len(kept)}).",
            )
        if is_there:
            write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def on_epoch(self, record: EpochRecord) -> None:
        """Append one line and flush it, so that a killed run only lacks the epoch it was in."""
        self._append(finite(dataclasses.asdict(record)))

    def on_class_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        write_atomically(self._confusion[which], as_csv(counts))

    def on_learner_count(self, change: LearnerCount) -> None:
        self._append({"event": "auto_tuner", **dataclasses.asdict(change)})

    def on_end(self, summary: Summary) -> None:
        write_json(self._summary, dataclasses.asdict(summary))

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self._metrics, "a", opener=own_file) as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the epochs of a metrics.jsonl."""
    return [line for line in read_records(path)[0] if "event" not in line]


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return all lines, epochs and decisions, and how many were left out as unreadable, such as one torn by a crash."""
    lines, damaged = [], 0
    with open(path, encoding="utf-8", errors="replace", opener=own_file) as file:
        texts = file.read().splitlines()
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and isinstance(line.get("samples_seen"), int):
            lines.append(line)
        else:
            damaged += bool(text.strip())
    return lines, damaged


def read_summary(output_dir: Path) -> dict[str, Any]:
    """Return a run's summary.json; empty if it is missing or unreadable."""
    return read_json(output_dir / SUMMARY_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty if it is missing or unreadable."""
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write plain values as JSON, as `write_atomically` does; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(values), indent=indent, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Write `text` so that a reader, or a crash, sees either the old file or the new one; one of the owner's alone."""
    with replacing(path, synced=True) as partial:
        if private:
            partial.touch(mode=0o600)
        partial.write_text(text, encoding="utf-8")


def finite(value: Any) -> Any:
    """Return plain values with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
