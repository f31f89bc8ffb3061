"""The format of checkpoints, and reading them: a folder with one file per rank and a manifest of hashes.

    checkpoints/samples-000000320000/rank-0.pt        tensors and plain types only
    checkpoints/samples-000000320000/rank-1.pt
    checkpoints/samples-000000320000/manifest.json    format version, samples seen, ranks, sha256 of every file

A checkpoint is complete or does not exist. This module finds, verifies and reads checkpoints; `writer` writes them.
Files are read only after their hash was verified, and code in them is never run.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from crossbow_py.core.errors import CheckpointError, one_line
from crossbow_py.core.files import own_file
from crossbow_py.core.plain_values import filled
from crossbow_py.core.settings import check, setting
from crossbow_py.telemetry.records import METRICS_FILE, SUMMARY_FILE

FORMAT_VERSION = 2
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 2**24  # enough for 100,000 ranks
# Values of settings that earlier versions did not have.
_ADDED: dict[str, Any] = {
    "node_period": 1,
    "order_seed": None,
    "label_smoothing": 0.0,
    "sampling": "shuffle",
    "class_weights": None,
    "sample_weights": None,
    "accumulate": 1,
    "groups": [],
    "rate_scaling": "none",
    "quadratic_period": None,
    "final_correction_rate": None,
    "count_effective_samples": False,
    "random_erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "rand_augment": 0,
    "transform": {},
    "test_transform": {},
    "average_ema": None,
    "objective": "throughput",
}
_SHA256 = re.compile(f"[{string.hexdigits}]{{64}}")


@dataclass(frozen=True)
class CheckpointSettings:
    """The times to write checkpoints, besides at the end, on SIGTERM and on Ctrl-C, and the number to keep."""

    GROUP: ClassVar[str] = ""

    every_epochs: int | None = setting(1, "epochs between checkpoints; null for none", minimum=1)
    every_s: float | None = setting(None, "seconds between checkpoints; null for none", above=0)
    keep: int = setting(2, "how many of the newest checkpoints to keep", minimum=1)

    def __post_init__(self) -> None:
        check(self)


class SavedCheckpoint:
    """A checkpoint folder whose manifest was read. Made by `open_checkpoint`.

    Attributes:
        folder: its path.
        samples_seen: the samples seen when it was written.
        num_ranks: the number of ranks that wrote it, one file each.
    """

    def __init__(self, folder: Path, samples_seen: int, hashes: list[str]) -> None:
        self.folder, self.samples_seen, self.num_ranks = folder, samples_seen, len(hashes)
        self._hashes = hashes
        self._verified: set[int] = set()

    def part(self, rank: int) -> dict[str, Any]:
        """Return what a rank wrote. The hash of its file is verified the first time.

        Tensors are memory-mapped and read from the disk when accessed: copy what must outlive the file.

        Raises:
            CheckpointError: the file is corrupted, or holds anything but tensors and plain types.
        """
        self._verify(rank)
        try:
            state = torch.load(self.folder / part_name(rank), map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch.load raises many kinds of exceptions for bad bytes
            raise self._unreadable(error) from error
        if not isinstance(state, dict):
            raise self._unreadable(TypeError(f"{part_name(rank)} holds a {type(state).__name__}"))
        return state

    def _verify(self, rank: int) -> None:
        if rank in self._verified:
            return
        try:
            with open(self.folder / part_name(rank), "rb", opener=own_file) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(error) from error
        if found != self._hashes[rank]:
            raise CheckpointError(
                f"checkpoint {self.folder} is corrupted: the hash of {part_name(rank)} differs; use another one."
            )
        self._verified.add(rank)

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} cannot be read ({one_line(error)}); use another one.")


def part_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.pt"


def open_checkpoint(folder: Path) -> SavedCheckpoint:
    """Read a checkpoint's manifest and check that its files exist; their hashes are verified when they are read.

    Raises:
        CheckpointError: there is no readable manifest, it is of a later version, or a file that it lists is missing, is
            not the file of a rank, or is outside the folder.
    """
    manifest = _manifest(folder)
    try:
        version = _whole_number(manifest, "format_version", 1)
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has format {version}, and this version reads up to {FORMAT_VERSION}; "
                "update crossbow_py."
            )
        samples_seen = _whole_number(manifest, "samples_seen", 0)
        num_ranks = 1 if version == 1 else _whole_number(manifest, "num_ranks", 1)
        hashes = _hashes(manifest, num_ranks)
    except (ValueError, KeyError, TypeError) as error:
        raise _bad_manifest(folder, error) from error
    for rank in range(num_ranks):
        _check_there(folder, part_name(rank))
    return SavedCheckpoint(folder, samples_seen, hashes)


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        with open(path, "rb", opener=own_file) as file:
            text = file.read(_MOST_MANIFEST_BYTES + 1)
        if len(text) > _MOST_MANIFEST_BYTES:
            raise ValueError(f"it has more than {_MOST_MANIFEST_BYTES} bytes")
        manifest = json.loads(text)
        if not isinstance(manifest, dict):
            raise TypeError(f"it holds a {type(manifest).__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _bad_manifest(folder, error) from error
    return manifest


def _bad_manifest(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} has no readable {MANIFEST} ({one_line(error)}); use another one.")


def _whole_number(manifest: Mapping[str, Any], key: str, minimum: int) -> int:
    value = manifest[key]
    if type(value) is not int or value < minimum:
        raise ValueError(f"{key} is {_short(value)}")
    return value


def _hashes(manifest: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Return the hashes by rank. Names must be exactly those of ranks' files, so that none leads elsewhere."""
    hashes = manifest["sha256"]
    if not isinstance(hashes, dict) or len(hashes) != num_ranks:
        raise ValueError(f"sha256 is not of {num_ranks} files")
    for name, value in hashes.items():
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise ValueError(f"the sha256 of {_short(name)} is {_short(value)}")
    names = [part_name(rank) for rank in range(num_ranks)]
    if set(names) != hashes.keys():
        raise ValueError(f"{_short(min(hashes.keys() - set(names)))} is not the file of a rank below {num_ranks}")
    return [hashes[name].lower() for name in names]


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_there(folder: Path, name: str) -> None:
    path = folder / name
    try:
        inside = path.resolve().parent == folder.resolve()
        problem = "" if inside and path.is_file() else f"{name} is {'no file' if inside else 'outside of it'}"
        path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        problem = one_line(error)
    if problem:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({problem}); use another one.")


def find_newest(path: Path) -> tuple[SavedCheckpoint, list[str]]:
    """Return the newest intact checkpoint of a run folder, a `checkpoints` folder or one checkpoint folder, verified.

    Also returns a message for every newer one that is damaged. Raises CheckpointError if there is no intact one.
    """
    if (path / MANIFEST).exists() or path.name.startswith("samples-"):
        return _verified(path), []
    candidates = checkpoints(path.parent if path.name == FOLDER else path)
    if not candidates:
        raise CheckpointError(f"no checkpoint in {path}; give resume= a run folder that has one, or drop resume.")
    problems: list[str] = []
    for candidate in candidates:
        try:
            return _verified(candidate), problems
        except CheckpointError as error:
            problems.append(f"{str(error).partition(';')[0]}; falling back to the one before.")
    raise CheckpointError(
        f"none of the {len(candidates)} checkpoints in {path} can be used ({problems[0].partition(';')[0]}); "
        "start afresh in another output_dir."
    )


def _verified(folder: Path) -> SavedCheckpoint:
    saved = open_checkpoint(folder)
    for rank in range(saved.num_ranks):
        saved.part(rank)  # memory-mapped, so it costs nothing besides the hashing
    return saved


@contextmanager
def taking_from(folder: Path) -> Iterator[None]:
    """Turn errors of a block that uses a part's contents into CheckpointError.

    Hashes only prove that contents are as they were written, not that a run wrote them in this format.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} does not hold what a run of this version writes ({one_line(error)[:200]}); "
            "use another one."
        ) from error


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, intact or not."""
    found = (run_folder / FOLDER).glob("samples-*") if (run_folder / FOLDER).is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=lambda path: path.name, reverse=True)


def newest_checkpoint(run_folder: Path | None) -> str | None:
    """Return the folder of a run's newest checkpoint, or None."""
    found = checkpoints(run_folder) if run_folder else []
    return str(found[0]) if found else None


def holds_run(folder: Path) -> bool:
    """Return whether `folder` holds anything that a fresh run would overwrite."""
    metrics = folder / METRICS_FILE
    recorded = metrics.exists() and metrics.stat().st_size > 0
    return recorded or (folder / SUMMARY_FILE).exists() or bool(checkpoints(folder))


def upgraded(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, nested plain values, with today's names, and what lacking ones of `settings` meant."""
    return filled(renamed(recorded), _formerly(settings))


def renamed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings with today's names: what was `averaging=sma` is `averaging=crossbow`."""
    averaging = recorded.get("averaging")
    if isinstance(averaging, Mapping) and averaging.get("name") == "sma" and "averaging_momentum" in averaging:
        return {**recorded, "averaging": {**averaging, "name": "crossbow"}}
    return dict(recorded)


def lost_rule(recorded: Mapping[str, Any]) -> bool:
    """Return whether recorded settings are of a rule that is gone: `grouped_sma` with Crossbow's z."""
    rule = recorded.get("averaging")
    return isinstance(rule, Mapping) and rule.get("name") == "grouped_sma" and "averaging_momentum" in rule


def _formerly(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as nested plain values, what earlier versions did where they lacked some of these settings."""
    nested = {key: _formerly(value) for key, value in settings.items() if isinstance(value, Mapping)}
    added = {key: _ADDED[key] for key in settings if key in _ADDED}
    return {key: settings[key] for key in ("name",) if key in settings} | nested | added
