"""The loader's speed: ratios worked out by hand, and a short measurement of tiny images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from experiments.loader import run
from experiments.loader.run import CACHED, DECODED, PILLOW, SHRUNK, Side


def measured_sides() -> list[Side]:
    """Pillow, one that is a quarter faster, and one about ten times as fast."""
    rates = {
        PILLOW: [400.0, 500.0, 400.0],
        DECODED: [500.0, 600.0, 500.0],
        SHRUNK: [450.0, 450.0, 450.0],
        CACHED: [5000.0, 5400.0, 6000.0],
    }
    return [Side(name, lambda epoch: 1.0, 9, values) for name, values in rates.items()]


def result() -> dict[str, Any]:
    facts = {"folder": "photos", "images": 9, "size": 16, "resize": 20, "method": {"foreign_share": 0.25}}
    return {**facts, **run.summary(measured_sides())}


def test_summary_compares_within_repetitions() -> None:
    summed = run.summary(measured_sides())
    assert summed["decoded_to_pillow"] == {"median": 1.25, "minimum": 1.2, "maximum": 1.25}
    assert summed["cached_to_decoded"] == {"median": 10.0, "minimum": 9.0, "maximum": 12.0}
    assert [summed["rows"][3][key] for key in ("images_per_s", "n")] == [5400.0, 3]


def test_batches_of_an_epoch_hold_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BATCH", 4)
    batches = list(run.batches_of(3, 2, 10))
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    samples = [(key.epoch, key.sample) for batch in batches for key in batch]
    assert samples == [(epoch, sample) for epoch in (6, 7) for sample in range(10)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be kept on a core here")
def test_on_cores_comes_back_to_all_of_them() -> None:
    before = os.sched_getaffinity(0)
    with run.on_cores([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_measurement_from_the_command_line_writes_its_result(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "photos.json"
    arguments = ["--folder", str(photos), "--size", "16", "--resize", "20", "--seconds", "0.05", "--json", str(path)]
    assert run.main(arguments) == 0
    written = json.loads(path.read_text())
    names = [PILLOW, DECODED, SHRUNK, CACHED, f"{DECODED}, by workers", f"{CACHED}, by workers"]
    assert [row["name"] for row in written["rows"]] == names
    assert all(row["images_per_s"] > 0 for row in written["rows"])
    assert written["folder"] == "photos"
    assert "9 training images of photos, crops of 16 x 16" in capsys.readouterr().out
