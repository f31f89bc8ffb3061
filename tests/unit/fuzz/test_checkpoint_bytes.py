"""Checkpoints and weights of any bytes: what was saved, or a sentence for the user; nothing outside is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from crossbow_py.core.errors import CheckpointError
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.train.checkpoints.checkpoint import find_newest
from crossbow_py.train.checkpoints.weights import load_weights, save_weights
from tests.unit.fuzz.examining import damaged, depths, examine

STATE = {
    "state": {"samples_seen": 100, "best": None, "loss": 2.5},
    "bank": {"w": torch.arange(12.0).view(4, 3), "half": torch.ones(5).bfloat16(), "steps": [torch.tensor(3)]},
}
NAME = "samples-000000000100"


def saved(**options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(STATE, content, **options)
    return content.getvalue()


PART = saved()
SHA256 = hashlib.sha256(PART).hexdigest()
MANIFEST = {"format_version": 2, "samples_seen": 100, "num_ranks": 1, "sha256": {"rank-0.pt": SHA256}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint, and beside it files of the same content that a manifest could lead to."""
    folder = tmp_path / "checkpoints" / NAME
    folder.mkdir(parents=True)
    (folder / "rank-0.pt").write_bytes(PART)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    for outside in (tmp_path / "outside.pt", folder.parent / "rank-0.pt"):
        outside.write_bytes(PART)
    os.mkfifo(tmp_path / "pipe")  # opening it would take for ever
    return folder


def touched(value: Any) -> int:
    """Read every tensor."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() > 10_000_000 or value.device.type != "cpu" or bool(value.clone().numel()))
    if isinstance(value, dict):
        return sum(map(touched, value.values()))
    return sum(map(touched, value)) if isinstance(value, list | tuple) else 0


def check_load(folder: Path) -> Callable[[bytes], None]:
    def check(content: bytes) -> None:
        with suppress(CheckpointError):
            touched(find_newest(folder)[0].part(0))
        with suppress(CheckpointError):
            find_newest(folder.parent.parent)

    return check


@depths(100, 2000)
def test_part_of_any_bytes_and_another_hash_is_refused(folder: Path, examples: int) -> None:
    def check(content: bytes) -> None:
        (folder / "rank-0.pt").write_bytes(content)
        if content != PART:
            with pytest.raises(CheckpointError, match=NAME):
                find_newest(folder)[0].part(0)

    examine(damaged(PART), check, examples)


@depths(100, 2000)
def test_part_of_any_bytes_and_its_own_hash_is_values_or_refused(folder: Path, examples: int) -> None:
    def check(content: bytes) -> None:
        (folder / "rank-0.pt").write_bytes(content)
        hashes = {"rank-0.pt": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({**MANIFEST, "sha256": hashes}))
        check_load(folder)(content)

    older = saved(_use_new_zipfile_serialization=False)
    examine(damaged(PART, older), check, examples)


@depths(150, 3000)
def test_manifest_of_any_bytes_is_read_or_refused(folder: Path, examples: int) -> None:
    def check(content: bytes) -> None:
        (folder / "manifest.json").write_bytes(content)
        check_load(folder)(content)

    deep = st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"format_version": 1e999}', b"\xff\xfe{}"]
    )
    examine(st.one_of(damaged(json.dumps(MANIFEST).encode()), deep), check, examples)


@depths(150, 3000)
def test_manifest_of_odd_values_is_refused_and_leads_nowhere(folder: Path, examples: int) -> None:
    outside = folder.parents[1]
    names = [
        "../rank-0.pt", "../../outside.pt", str(outside / "outside.pt"), "../../pipe", str(outside / "pipe"),
        "/dev/zero", "./rank-0.pt", "rank-0.pt/", "rank-00.pt", "rank-1.pt", "rank-0.pt\0", "", ".", "..",
        "manifest.json", "RANK-0.PT", f"../{NAME}/rank-0.pt", "rank-\u0660.pt", "\ud800",
    ]  # fmt: skip
    odd = st.sampled_from([SHA256, [], {}, 10**300])
    value = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), odd)
    hashes = st.dictionaries(st.sampled_from([*names, "rank-0.pt"]), st.one_of(st.just(SHA256), value), max_size=3)
    changes = st.fixed_dictionaries(
        {},
        optional={
            "format_version": st.one_of(value, st.sampled_from([1, 2, 3, 0, -1, 10**30])),
            "num_ranks": st.one_of(value, st.sampled_from([1, 2, 0, -1, 10**30])),
            "samples_seen": value,
            "sha256": st.one_of(hashes, hashes, value),
            "more": value,
        },
    )

    def check(change: dict[str, Any]) -> None:
        manifest = {**MANIFEST, **change}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        if manifest["sha256"] == MANIFEST["sha256"]:
            check_load(folder)(b"")
        else:
            with pytest.raises(CheckpointError, match=NAME):
                find_newest(folder)[0].part(0)

    examine(changes, check, examples)


@depths(100, 2000)
def test_weights_of_any_bytes_are_loaded_or_refused(tmp_path: Path, examples: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    path = tmp_path / "model.safetensors"
    save_weights(model, path)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(CheckpointError):
            load_weights(model, path)

    examine(damaged(path.read_bytes()), check, examples)


@depths(100, 2000)
def test_records_of_any_bytes_are_those_that_can_be_read(tmp_path: Path, examples: int) -> None:
    metrics, summary = tmp_path / "metrics.jsonl", tmp_path / "summary.json"
    lines = b"".join(json.dumps({"epoch": n, "samples_seen": n, "loss": 0.5}).encode() + b"\n" for n in range(3))
    odd = st.sampled_from(
        [b"[" * 100_000, b'{"samples_seen": ' + b"9" * 5000 + b"}", b"NaN", b'"text"', b"\xff", b"null"]
    )

    def check(content: bytes) -> None:
        metrics.write_bytes(content)
        summary.write_bytes(content)
        assert all("samples_seen" in line for line in read_metrics(metrics))
        assert isinstance(read_summary(tmp_path), dict)

    examine(st.one_of(damaged(lines), odd, odd.map(lambda line: lines + line)), check, examples)
