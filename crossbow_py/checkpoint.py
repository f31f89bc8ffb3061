"""Checkpoints that are whole or not there: a folder with one file a rank and a manifest of hashes.

    checkpoints/samples-000000320000/rank-0.pt        tensors and plain types only
    checkpoints/samples-000000320000/manifest.json    format version, samples seen, sha256 of every file

A checkpoint is written into a hidden folder, fsynced and renamed, so a crash at any moment leaves the previous one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from crossbow_py.errors import CheckpointError
from crossbow_py.settings import check, setting
from crossbow_py.targets import one_line
from crossbow_py.telemetry.records import METRICS_FILE, SUMMARY_FILE

FORMAT_VERSION = 1
FOLDER = "checkpoints"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CheckpointSettings:
    """When a checkpoint is written besides the end, SIGTERM and Ctrl-C, and how many are kept."""

    GROUP: ClassVar[str] = ""

    every_epochs: int | None = setting(1, "write a checkpoint every that many epochs; null never", minimum=1)
    every_s: float | None = setting(None, "write a checkpoint every that many seconds; null never", above=0)
    keep: int = setting(2, "how many of the newest checkpoints to keep", minimum=1)

    def __post_init__(self) -> None:
        check(self)


def save(run_folder: Path, state: Mapping[str, Any], samples_seen: int, keep: int) -> Path:
    """Write a checkpoint of rank 0, then drop what it replaces. Returns its folder.

    Dropped are the oldest beyond `keep`, and those of more samples: they are of a future this run has not had, because
    it went back to an older checkpoint or started afresh in this folder.

    Raises OSError when the disk refuses; what was there before is untouched.
    """
    parent = run_folder / FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    _drop_hidden(parent)
    final = parent / f"samples-{samples_seen:012d}"
    partial = parent / f".{final.name}.partial"
    try:
        _write(partial, state, samples_seen)
    except OSError:
        _drop_hidden(parent)  # a full disk needs the room
        raise
    if final.exists():  # of another run, or corrupted: `save` is not asked twice for one state
        final.rename(parent / f".{final.name}.replaced")
    partial.rename(final)
    _sync_folder(parent)
    _drop_hidden(parent)
    older = [path for path in checkpoints(run_folder) if path.name < final.name]
    for path in checkpoints(run_folder):
        if path != final and path not in older[: keep - 1]:
            shutil.rmtree(path, ignore_errors=True)
    return final


def _write(folder: Path, state: Mapping[str, Any], samples_seen: int) -> None:
    folder.mkdir()
    with open(folder / "rank-0.pt", "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # how torch says that the file could not be written
            raise OSError(str(error)) from error
        file.flush()
        _sync(file.fileno())
    manifest = {
        "format_version": FORMAT_VERSION,
        "samples_seen": samples_seen,
        "sha256": {"rank-0.pt": _sha256(folder / "rank-0.pt")},
    }
    with open(folder / _MANIFEST, "w", encoding="utf-8") as text:
        json.dump(manifest, text, indent=2)
        text.flush()
        _sync(text.fileno())
    _sync_folder(folder)


def _drop_hidden(parent: Path) -> None:
    """What a crash or a replacement left behind."""
    for path in parent.glob(".samples-*"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoint folders of a run, newest first; whole or not."""
    found = (run_folder / FOLDER).glob("samples-*") if (run_folder / FOLDER).is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=lambda path: path.name, reverse=True)


def holds_run(folder: Path) -> bool:
    """Whether there is anything in `folder` that a fresh run would spoil."""
    metrics = folder / METRICS_FILE
    recorded = metrics.exists() and metrics.stat().st_size > 0
    return recorded or (folder / SUMMARY_FILE).exists() or bool(checkpoints(folder))


def load(folder: Path) -> dict[str, Any]:
    """Read and verify one checkpoint folder. Raises CheckpointError saying what is wrong with it."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        version, hashes = int(manifest["format_version"]), dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} has no readable {_MANIFEST} ({one_line(error)}); use another one."
        ) from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format {version}, and this version reads up to {FORMAT_VERSION}; "
            "update crossbow_py."
        )
    try:
        for name, expected in {"rank-0.pt": None, **hashes}.items():
            if _sha256(folder / name) != expected:
                raise CheckpointError(f"checkpoint {folder} is corrupted: the hash of {name} differs; use another one.")
        state: dict[str, Any] = torch.load(folder / "rank-0.pt", map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch.load answers bad bytes with many kinds of exception
        raise CheckpointError(f"checkpoint {folder} cannot be read ({one_line(error)}); use another one.") from error
    return state


def load_newest(path: Path) -> tuple[dict[str, Any], Path, list[str]]:
    """The newest valid checkpoint of a run folder, a `checkpoints` folder, or one checkpoint folder.

    Returns the state, its folder, and a sentence for every newer one that had to be passed over.
    Raises CheckpointError when none is left.
    """
    if (path / _MANIFEST).exists() or path.name.startswith("samples-"):
        return load(path), path, []
    candidates = checkpoints(path.parent if path.name == FOLDER else path)
    if not candidates:
        raise CheckpointError(f"no checkpoint in {path}; give resume= a run folder that has one, or drop resume.")
    problems: list[str] = []
    for candidate in candidates:
        try:
            return load(candidate), candidate, problems
        except CheckpointError as error:
            problems.append(f"{str(error).partition(';')[0]}; falling back to the one before.")
    raise CheckpointError(
        f"none of the {len(candidates)} checkpoints in {path} can be used ({problems[0].partition(';')[0]}); "
        "start afresh in another output_dir."
    )


def differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """`key: saved → current` for every leaf at which two plain nested values differ.

    Where the `name` of something differs, that says it all: settings of different things are not compared.
    """
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        renamed = saved.get("name") != current.get("name")
        keys = ["name"] if renamed else sorted(set(saved) | set(current))
        nested = (differences(saved.get(k), current.get(k), f"{path}.{k}" if path else str(k)) for k in keys)
        return [line for lines in nested for line in lines]
    return [] if saved == current else [f"{path}: {saved} → {current}"]


def save_weights(module: nn.Module, path: Path) -> None:
    """Write a model as safetensors, atomically; tied parameters are stored once. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode  # as the umask says; safetensors would leave a file only its owner can read
    try:
        save_model(module, str(partial))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    partial.chmod(mode)
    with open(partial, "rb+") as file:
        _sync(file.fileno())
    partial.rename(path)
    _sync_folder(path.parent)


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fill a module from safetensors (fine-tuning). Raises CheckpointError naming what does not fit."""
    try:
        values = load_file(str(path))
    except Exception as error:
        raise CheckpointError(
            f"init_from={path} cannot be read as safetensors ({error}); give a .safetensors file."
        ) from error
    own = module.state_dict(keep_vars=True)
    wrong = _unfitting(own, values)
    if wrong:
        raise CheckpointError(f"init_from={path} does not fit this model: {wrong}; choose the model it was saved from.")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _unfitting(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> str:
    # Tied tensors are one object under several names, of which the file has any one.
    filled = {id(own[name]) for name in values if name in own}
    for name in sorted(own.keys() | values.keys()):
        if name not in own or id(own[name]) not in filled:
            return f"{name} is only in the {'model' if name in own else 'file'}"
    for name, value in values.items():
        if own[name].shape != value.shape:
            return f"{name} is {list(value.shape)} in the file and {list(own[name].shape)} in the model"
    return ""


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
