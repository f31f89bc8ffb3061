"""Runs that are killed again and again: when to kill, and what is looked at after every kill."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from crossbow_py.core.errors import CheckpointError
from crossbow_py.telemetry.records import METRICS_FILE, read_metrics
from crossbow_py.train.checkpoints.checkpoint import (
    FOLDER,
    MANIFEST,
    CheckpointSettings,
    checkpoints,
    open_checkpoint,
    part_name,
)
from experiments.faults.processes import Start, start

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
EXECUTORS = ("serial", "threads")
# Of a line of metrics.jsonl, what does not depend on the clock.
_MEASURED = ("epoch", "samples_seen", "train_loss", "test_loss", "test_accuracy", "learning_rate", "spread")
_POLL_S = 0.0003
_WRITE_S = 0.02  # until one was seen
_WHOLE_RUN_S = 600.0
_WAITS_S = 0.6  # at most, when the moment is any
_MOST_CHECKPOINTS = 3  # of a start, before the one it is killed in


@dataclass(frozen=True)
class Kill:
    """One kill: where it fell, what was on disk, and what the next start has gone on from.

    Attributes:
        aimed: whether it was to fall into a checkpoint's writing, at a random moment of it.
        ranks: which were killed.
        phase: one of PHASES.
        after_s: since the first sign of a round of this start.
        whole: samples of the newest whole checkpoint.
        resumed: samples of that the next start went on from; None where it started afresh.
        problems: what was wrong with checkpoints that are listed.
        others: exit codes of ranks that were not killed.
    """

    aimed: bool
    ranks: tuple[int, ...]
    phase: str
    after_s: float
    whole: int | None
    problems: tuple[str, ...]
    others: tuple[int | None, ...]
    resumed: int | None = None


@dataclass
class KilledRun:
    num_ranks: int
    executor: str
    kills: list[Kill] = field(default_factory=list)
    exit_codes: tuple[int | None, ...] = ()
    model_is_equal: bool = False
    lines_are_equal: bool = False

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


class Campaign:
    """Runs in `folder`, all of one seed and so many epochs, each compared with one that nobody disturbed."""

    def __init__(self, folder: Path, epochs: float, seed: int) -> None:
        self._folder, self._epochs = folder, epochs
        self._random = random.Random(seed)
        self._write_s: list[float] = []
        self._undisturbed: dict[tuple[int, str], Path] = {}

    def run(self, num_ranks: int, executor: str, num_kills: int, name: str) -> KilledRun:
        """A run that is killed so many times, if it lasts that long, and then comes to its end."""
        folder, found = self._folder / name, KilledRun(num_ranks, executor)
        while len(found.kills) < num_kills:
            kill = self._killed_start(folder, num_ranks, executor)
            if kill is None:
                break
            found.kills.append(kill)
        begun = self._start(folder, num_ranks, executor)
        found.exit_codes = tuple(begun.wait(_WHOLE_RUN_S))
        said = resumed_from((folder / "console.log").read_text(encoding="utf-8"))
        found.kills = [Kill(**{**asdict(kill), "resumed": said[place + 1]}) for place, kill in enumerate(found.kills)]
        other = self._reference(num_ranks, executor)
        found.model_is_equal = _model(folder) == _model(other)
        found.lines_are_equal = _lines(folder) == _lines(other)
        return found

    def _start(self, folder: Path, num_ranks: int, executor: str) -> Start:
        arguments = [
            "+experiment=digits", "device=cpu", "precision=fp32", "num_learners=2", f"executor={executor}",
            f"max_epochs={self._epochs}", "checkpoint_every_epochs=null", "checkpoint_every_s=0.1", "resume=auto",
            f"output_dir={folder}",
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        return start(arguments, folder / "output.log", num_ranks)

    def _reference(self, num_ranks: int, executor: str) -> Path:
        key = (num_ranks, executor)
        if key not in self._undisturbed:
            folder = self._folder / f"undisturbed_{num_ranks}_{executor}"
            codes = self._start(folder, num_ranks, executor).wait(_WHOLE_RUN_S)
            assert codes == [0] * num_ranks, f"the undisturbed run ended with {codes}; see {folder}/output.log"
            self._undisturbed[key] = folder
        return self._undisturbed[key]

    def _killed_start(self, folder: Path, num_ranks: int, executor: str) -> Kill | None:
        """Start the run and kill it after its first round; None when it came to its end before that."""
        leftovers = hidden(folder)
        aimed = self._random.random() < 0.5
        ranks = tuple(range(num_ranks)) if self._random.random() < 0.5 else (self._random.randrange(num_ranks),)
        begun = self._start(folder, num_ranks, executor)
        watcher = _Watcher(begun, folder, leftovers)
        first_s = watcher.await_write()
        if aimed:
            for _ in range(self._random.randrange(_MOST_CHECKPOINTS)):
                self._write_s += watcher.await_end_of_write()
                watcher.await_write()
            time.sleep(self._random.uniform(0, 1.2 * median(self._write_s or [_WRITE_S])))
        else:
            self._write_s += watcher.watch_for(self._random.uniform(0, _WAITS_S))
        if not all(process.is_alive() for process in begun.processes):
            begun.wait()
            return None
        after_s = time.monotonic() - first_s
        begun.kill(ranks)
        found = phase(folder, leftovers, num_ranks, CheckpointSettings.keep)
        codes = begun.wait()
        newest, problems = look_at(folder)
        others = tuple(code for rank, code in enumerate(codes) if rank not in ranks)
        return Kill(aimed, ranks, found, round(after_s, 4), newest, tuple(problems), others)


class _Watcher:
    """Sees checkpoints of one start being written, by the hidden folder there is meanwhile."""

    def __init__(self, begun: Start, folder: Path, leftovers: Seen) -> None:
        self._begun, self._folder, self._leftovers = begun, folder, leftovers

    def _writes(self) -> bool:
        return any(name.endswith(".partial") for name, _ in hidden(self._folder) - self._leftovers)

    def _await(self, writes: bool) -> float:
        while self._writes() is not writes and self._begun.runs:
            time.sleep(_POLL_S)
        return time.monotonic()

    def await_write(self) -> float:
        """Block until one is being written, which none is before the first round; returns when."""
        return self._await(True)

    def await_end_of_write(self) -> list[float]:
        """Block until it is not any more; returns how long that took."""
        begin_s = time.monotonic()
        return [self._await(False) - begin_s]

    def watch_for(self, seconds: float) -> list[float]:
        """Block for so long; returns how long each write took that was seen whole."""
        end_s, begin_s, seen = time.monotonic() + seconds, None, list[float]()
        while time.monotonic() < end_s and self._begun.runs:
            if self._writes():
                begin_s = begin_s or time.monotonic()
            elif begin_s is not None:
                seen.append(time.monotonic() - begin_s)
                begin_s = None
            time.sleep(_POLL_S)
        return seen


def _model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def _lines(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in _MEASURED) for line in read_metrics(folder / METRICS_FILE)]


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count kills with a checkpoint to go on from, and what came of them, in runs of a results file."""
    kills = [kill for run in runs for kill in run["kills"]]
    with_one = [kill for kill in kills if kill["whole"] is not None]
    return {
        "runs": len(runs),
        "kills": len(with_one),
        "in_write": sum(kill["phase"] != BETWEEN for kill in with_one),
        "resumed": sum(kill["resumed"] == kill["whole"] for kill in with_one),
        "before_first": len(kills) - len(with_one),
        "afresh": sum(kill["resumed"] is None for kill in kills if kill["whole"] is None),
        "corrupt": sum(len(kill["problems"]) for kill in kills),
        "ended": sum(set(run["exit_codes"]) == {0} for run in runs),
        "equal_models": sum(run["model_is_equal"] for run in runs),
        "equal_lines": sum(run["lines_are_equal"] for run in runs),
    }


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
