"""A run's folder as plain values. What is missing or damaged is left out and named: a report shows what there is."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import check_own, is_held, read_text
from crossbow_py.core.plain_values import told_apart
from crossbow_py.search.events import SEARCH_FILE
from crossbow_py.telemetry.class_counts import ClassCounts, from_csv
from crossbow_py.telemetry.figures import MOST_RUNS, RecordedRun, number
from crossbow_py.telemetry.records import (
    CONFIG_FILE,
    CONFUSION_FILES,
    METRICS_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    read_json,
    read_records,
)
from crossbow_py.telemetry.timeline import TRACE_FILE
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from crossbow_py.train.run_folder.folder import LOCK_FILE

_TIME_NAME = re.compile(r"(^|/)\d{4}-\d\d-\d\d_[\d_-]+$")
_FOLDERS_DEEP = 3  # runs/<experiment>/<sweep>/<job>

Point = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """A task of a stream between two times, in microseconds of the run's own clock; `round_index` if it is known."""

    task: str
    stream: str
    start_us: float
    end_us: float
    round_index: int | None


@dataclass(frozen=True, kw_only=True)
class RunRecord(RecordedRun):
    """The records of a run, as its folder has them.

    Attributes:
        name: short, and different for each run of a report.
        decisions: those of the auto-tuner.
        curves: scalars by tag, as (samples seen, value).
        spans: of the timeline, in the order they began.
        class_counts: the confusion matrix of the test data, or of the validation data in a run that has not ended.
        notes: what is missing or cannot be read.
    """

    name: str
    decisions: Sequence[Mapping[str, Any]] = ()
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    class_counts: ClassCounts | None = None
    notes: Sequence[str] = ()

    def by_epoch(self, key: str, x: str = "samples_seen") -> list[Point]:
        """Return a column of metrics.jsonl over another, where both are numbers."""
        points = ((number(line.get(x)), number(line.get(key))) for line in self.epochs)
        return [(at, value) for at, value in points if at is not None and value is not None]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs that `paths` are or hold, in that order, each once. Raises UserError."""
    found: dict[Path, Path] = {}
    for path in paths:
        for folder in _runs_in(path):
            found.setdefault(folder.resolve(), folder)
    if len(found) > MOST_RUNS:
        raise UserError(
            f"a report compares at most {MOST_RUNS} runs, got {len(found)}; name up to {MOST_RUNS} of them."
        )
    return list(found.values())


def _runs_in(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run, such as runs/digits/<time>.")
    if not path.is_dir():
        raise UserError(f"{path} is a file; give the folder of a run, which holds {METRICS_FILE}.")
    if _is_search(path):
        raise UserError(
            f"{path} is the folder of a search, not of a run; its results are in {SEARCH_FILE} and pictures."
        )
    if _is_run(path):
        return [path]
    beneath = [folder for folder in _beneath(path, _FOLDERS_DEEP) if _is_run(folder) and not _is_search(folder)]
    if not beneath:
        raise UserError(
            f"{path} holds no run: there is neither {METRICS_FILE} nor {SUMMARY_FILE} nor a checkpoint; give a run's "
            "folder, such as runs/digits/<time>."
        )
    return beneath


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_FILE, SUMMARY_FILE)) or bool(checkpoints(folder))


def _is_search(folder: Path) -> bool:
    return (folder / SEARCH_FILE).is_file()


def _beneath(path: Path, depth: int) -> Iterator[Path]:
    try:
        folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:  # nobody may look into it
        return
    for folder in folders:
        yield folder
        if depth > 1:
            yield from _beneath(folder, depth - 1)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Return everything there is of each."""
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    told = told_apart([run.config for run in runs])
    if len(set(told)) == len(runs) > 1 and all(told) and all(_TIME_NAME.search(run.name) for run in runs):
        return [replace(run, name=own) for run, own in zip(runs, told, strict=True)]  # the time says nothing of a run
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Paths without what all have in common; the name of the experiment and of the run where there is only one."""
    resolved = [folder.resolve() for folder in folders]
    if len(resolved) == 1:
        return ["/".join(resolved[0].parts[-2:])]
    common = os.path.commonpath([folder.parent for folder in resolved])
    return [os.path.relpath(folder, common) for folder in resolved]


def _read_run(folder: Path, name: str) -> RunRecord:
    notes: list[str] = []
    epochs, decisions = _read_metrics(folder, notes)
    summary = read_json(folder / SUMMARY_FILE)
    if not (folder / SUMMARY_FILE).is_file():
        notes.append(f"no {SUMMARY_FILE}: the run goes on, or was killed; resume=auto goes on with it")
    elif not summary:
        notes.append(f"{SUMMARY_FILE} cannot be read")
    without_summary = "running" if is_held(folder / LOCK_FILE) else "unfinished"
    return RunRecord(
        name=name,
        folder=folder,
        status=str(summary.get("status", "unknown")) if summary else without_summary,
        config=_flat(_read_config(folder, notes)),
        epochs=epochs,
        decisions=decisions,
        summary=summary,
        curves=_read_curves(folder / TENSORBOARD_FOLDER, epochs, notes),
        spans=_read_spans(folder / TRACE_FILE, notes),
        class_counts=_read_class_counts(folder, notes),
        notes=notes,
    )


def _read_metrics(folder: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    path = folder / METRICS_FILE
    if not path.is_file():
        notes.append(f"no {METRICS_FILE}: no epoch was evaluated yet")
        return [], []
    try:
        lines, damaged = read_records(path)
    except OSError as error:
        notes.append(f"{METRICS_FILE} cannot be read ({error.strerror})")
        return [], []
    if damaged:
        notes.append(f"{METRICS_FILE} has {damaged} line{'s' if damaged > 1 else ''} that cannot be read")
    lines.sort(key=lambda line: int(line["samples_seen"]))
    return [_with_metrics(line) for line in lines if "event" not in line], [
        line for line in lines if line.get("event") == "auto_tuner"
    ]


def _with_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of an epoch with its metrics as columns, `metrics/name`, which are also their tags."""
    own = line.get("metrics")
    return {**line, **{f"metrics/{name}": value for name, value in own.items()}} if isinstance(own, dict) else line


def _read_config(folder: Path, notes: list[str]) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).is_file():
        notes.append(f"no {CONFIG_FILE}: a run from Python has none")
        return {}
    try:
        return read_yaml(folder / CONFIG_FILE)
    except UserError:
        notes.append(f"{CONFIG_FILE} cannot be read")
        return {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted keys; the `name` in a group is the group's own value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix.rstrip(".") if key == "name" and prefix else f"{prefix}{key}"] = value
    return found


def _read_curves(folder: Path, epochs: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, list[Point]]:
    """Return every scalar of the event files, which have points inside epochs."""
    try:
        check_own(folder.parent, (), (TENSORBOARD_FOLDER,))  # TensorBoard's reader would wait for a pipe
    except OSError as error:
        notes.append(f"{TENSORBOARD_FOLDER}/ cannot be read ({error.strerror}): curves have a point an epoch")
        return {}
    if not folder.is_dir():
        notes.append(f"no {TENSORBOARD_FOLDER}/: curves have a point an epoch")
        return {}
    # A tenth of a second, which other commands need not wait for.
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]  # noqa: PLC0415
        EventAccumulator,
    )

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of runs that went on from a checkpoint
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    try:
        events.Reload()
        tags = events.Tags()["scalars"]
        curves = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}
    except Exception as error:  # whatever a reader of somebody else's format raises at damaged bytes
        notes.append(f"{TENSORBOARD_FOLDER}/ cannot be read ({type(error).__name__}): curves have a point an epoch")
        return {}
    # A file that was cut off, or is damaged from somewhere on, ends there for TensorBoard's reader.
    last = max((step for step, _ in curves.get("loss/train", ())), default=-1)
    if epochs and last < epochs[-1]["samples_seen"] and number(epochs[-1].get("train_loss")) is not None:
        notes.append(f"{TENSORBOARD_FOLDER}/ ends before {METRICS_FILE} does: some of it cannot be read")
    return curves


def _read_class_counts(folder: Path, notes: list[str]) -> ClassCounts | None:
    """Return the confusion matrix; None without one, as of data without classes."""
    for name in CONFUSION_FILES.values():
        if (folder / name).is_file():
            try:
                return from_csv(read_text(folder / name))
            except (OSError, ValueError):
                notes.append(f"{name} cannot be read")
    return None


def _read_spans(path: Path, notes: list[str]) -> list[Span]:
    """Return the spans of a trace; none without a file, which only trace=true writes."""
    if not path.is_file():
        return []
    events = read_json(path).get("traceEvents")
    try:
        assert isinstance(events, list)
        return _spans(events)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        notes.append(f"{TRACE_FILE} cannot be read")
        return []


def _spans(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    streams = {event["tid"]: str(event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X":
            start, length = float(event["ts"]), float(event["dur"])
            index = event.get("args", {}).get("round")
            stream = streams.get(event["tid"], str(event["tid"]))
            spans.append(
                Span(str(event["name"]), stream, start, start + length, index if isinstance(index, int) else None)
            )
    return sorted(spans, key=lambda span: span.start_us)
