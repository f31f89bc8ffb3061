"""A tracking service in memory, which may be made to fail or to hang."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.telemetry.events import Images
from crossbow_py.telemetry.loggers.tracker import Point, Subject, Tracker, TrialRun


class MemoryTracker(Tracker):
    """Keeps every call that went well as (method, what it was given).

    Attributes:
        error: what all methods but `open` raise, if it is set.
        fails: how many times more; None is for good.
        refused: the samples seen of a point that `log` raises for.
        asked: the number of calls.
        may_go_on: the methods wait for it.
    """

    NAME, KEY, MODULE, IS_SHARED = "Service", "service", "json", True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.fails: int | None = None
        self.refused: int | None = None
        self.asked = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def of(self, method: str) -> list[Any]:
        """What one method was given, in order."""
        return [given for name, given in self.calls if name == method]

    @property
    def points(self) -> list[Point]:
        """All points, of however many deliveries."""
        return [point for points in self.of("log") for point in points]

    def open(self, subject: Subject) -> list[str]:
        self.calls.append(("open", subject))
        return ["Service records this."]

    def log(self, points: Sequence[Point]) -> None:
        if self.error is None and self.refused in [point.samples_seen for point in points]:
            raise ValueError("no such point")
        self._keep("log", list(points))

    def picture(self, name: str, picture: Images, samples_seen: int) -> None:
        self._keep("picture", (name, picture.shape, samples_seen))

    def file(self, path: Path) -> None:
        self._keep("file", path.name)

    def model(self, path: Path) -> None:
        self._keep("model", path.name)

    def trials(self, trials: Sequence[TrialRun], metric: str) -> None:
        self._keep("trials", (list(trials), metric))

    def end(self, status: str, samples_seen: int, figures: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        self._keep("end", (status, samples_seen, dict(figures), dict(facts)))

    def _keep(self, method: str, given: Any) -> None:
        self.may_go_on.wait(10)
        self.asked += 1
        if self.error is not None and self.fails != 0:
            self.fails = None if self.fails is None else self.fails - 1
            raise self.error
        self.calls.append((method, given))


def mlflow_template(factory: Any) -> Path:
    """A database of MLflow with its tables, which take seconds to make: once in a session, to be copied."""
    import mlflow  # noqa: PLC0415  an extra

    path: Path = factory.getbasetemp() / "mlflow_template.db"
    if not path.exists():
        mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def wandb_records(folder: Path, kind: str) -> list[Any]:
    """The records of a kind, such as `run`, `history` and `exit`, of the offline runs in a folder, in their order."""
    import wandb  # noqa: PLC0415  an extra
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    wandb.teardown()  # files are complete when its process has ended
    found = []
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for data in _log_entries(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                found.append(getattr(record, kind))
    return found


def _log_entries(data: bytes) -> Iterator[bytes]:
    """The entries of a file in the log format of LevelDB, which is in blocks of 32 KiB, behind a header of 7 bytes."""
    at, entry = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no head of an entry has room there
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack("<IHB", data[at : at + 7])  # part: 1 whole, 2 first, 3 between, 4 last
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield entry
            entry = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The rows that offline runs in a folder have logged; what a picture or a table holds is there as `name/...`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in wandb_records(folder, "history")
    ]
