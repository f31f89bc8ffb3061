"""The loader's speed: windows that are dropped, ratios worked out by hand, and a short measurement of tiny images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from experiments.loader import measure, plot, report, run, sides
from experiments.loader.sides import CACHED, DECODED, PILLOW, SHRUNK, Side
from tests.unit.data.images.pictures import write_part


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of nine training images."""
    write_part(tmp_path / "photos" / "train")
    write_part(tmp_path / "photos" / "val", per_class=1)
    return tmp_path / "photos"


def measured_sides() -> list[Side]:
    """Pillow, one that is a quarter faster, and one ten times as fast with a window without a clean attempt."""
    windows: dict[str, list[float | None]] = {
        PILLOW: [400.0, 500.0, 400.0],
        DECODED: [500.0, 600.0, 500.0],
        SHRUNK: [450.0, 450.0, 450.0],
        CACHED: [5000.0, None, 6000.0],
    }
    made = [Side(name, lambda epoch: 1.0, 9) for name in windows]
    for side in made:
        side.windows = windows[side.name]
    made[-1].dropped = 3
    return made


def result() -> dict[str, Any]:
    return {"folder": "photos", "images": 9, "size": 16, "resize": 20, **measure.summary(measured_sides())}


def test_summary_compares_within_repetitions() -> None:
    summed = measure.summary(measured_sides())
    assert summed["decoded_to_pillow"] == {"median": 1.25, "minimum": 1.2, "maximum": 1.25}
    assert summed["cached_to_decoded"] == {"median": 11.0, "minimum": 10.0, "maximum": 12.0}
    assert [summed["rows"][3][key] for key in ("images_per_s", "n", "dropped")] == [5500.0, 2, 3]


def test_summary_without_clean_windows_has_no_figures() -> None:
    empty = measured_sides()
    for side in empty:
        side.windows = [None]
    summed = measure.summary(empty)
    assert (summed["decoded_to_pillow"], summed["rows"][0]["images_per_s"]) == (None, None)
    assert "–" in report.sides_table({**result(), **summed})


def test_window_in_which_others_were_busy_is_dropped_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(measure, "foreign_share", lambda before, after: next(shares))
    monkeypatch.setattr(measure, "_RETRY_AFTER_S", 0.0)
    side = Side(DECODED, lambda epoch: 0.5, 100)
    for epoch in range(2):
        assert measure._repetition(side, epoch, end_s=float("inf"))
    assert (side.windows, side.dropped) == ([200.0, None], 4)


def test_rate_of_several_cores_is_a_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(DECODED, lambda epoch: 0.5, 100, cores=4, watches_load=False)
    assert measure._repetition(side, 0, end_s=0.0)
    assert side.windows == [50.0]


def test_batches_of_an_epoch_hold_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "BATCH", 4)
    batches = list(sides.batches_of(3, 10))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [key for batch in batches for key in batch] == [(3, sample) for sample in range(10)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be kept on a core here")
def test_on_cores_comes_back_to_all_of_them() -> None:
    before = os.sched_getaffinity(0)
    with sides.on_cores([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_measurement_from_the_command_line_writes_its_result(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "MAX_FOREIGN_SHARE", float("inf"))
    path = tmp_path / "photos.json"
    arguments = ["--folder", str(photos), "--size", "16", "--resize", "20", "--seconds", "0.05", "--json", str(path)]
    assert run.main(arguments) == 0
    written = json.loads(path.read_text())
    names = [PILLOW, DECODED, SHRUNK, CACHED, f"{DECODED}, by workers", f"{CACHED}, by workers"]
    assert [row["name"] for row in written["rows"]] == names
    assert all(row["images_per_s"] > 0 for row in written["rows"])
    assert written["folder"] == "photos"
    assert "9 training images of photos, crops of 16 x 16" in capsys.readouterr().out


def test_measurement_without_images_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(["--folder", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert "is not there" in capsys.readouterr().err


def test_table_has_every_side() -> None:
    table = report.sides_table(result()).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]] == [
        ["Pillow", "400", "1", "0.80 (0.80–0.83)", "3", "0"],
        ["decoded", "500", "1.25 (1.20–1.25)", "1", "3", "0"],
        ["decoded, shrunk", "450", "1.12 (0.90–1.12)", "0.90 (0.75–0.90)", "3", "0"],
        ["cached", "5,500", "13.75 (12.50–15.00)", "11.00 (10.00–12.00)", "2", "3"],
    ]


def test_picture_has_a_bar_for_every_side() -> None:
    (axes,) = plot.draw({"photos_16": result()}).axes
    assert [bar.get_width() for bar in axes.patches] == [400.0, 500.0, 450.0, 5500.0]
