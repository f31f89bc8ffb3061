"""The share of preprocessing: figures by hand, table and picture of a made-up result, a short measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import windows
from experiments.bench.windows import Window, Windows
from experiments.preprocessing import plot, run
from experiments.preprocessing.run import LOOP, OWN, WORKER, Side


def windows_of(*pairs: tuple[float, float]) -> Windows:
    return Windows([Window(rate, share, 0.1, 4) for rate, share in pairs])


def result() -> dict[str, Any]:
    sides = [
        Side(OWN, 1, windows_of((400.0, 0.8), (500.0, 0.8), (400.0, 0.7))),
        Side(LOOP, 16, windows_of((2000.0, 0.2), (2000.0, 0.25), (2400.0, 0.3))),
        Side(WORKER, 16, Windows([Window(4000.0, 0.0, 0.1, 4), None, Window(4000.0, 0.02, 0.1, 4)], dropped=3)),
    ]
    return {
        "folder": "photos", "images": 9, "size": 64, "batch_size": 16, "parameters": 1000, "method": {"rounds": 4},
        **run.summary(sides),
    }  # fmt: skip


def test_sides_are_one_model_alone_and_two_ways_for_every_number() -> None:
    assert [(side.name, side.num_models, side.num_workers) for side in run.sides_of([4, 1, 4])] == [
        (OWN, 1, 0),
        (LOOP, 1, 0),
        (WORKER, 1, 1),
        (LOOP, 4, 0),
        (WORKER, 4, 1),
    ]


@pytest.mark.parametrize(
    ("share", "num_models", "verdict"),
    [(0.05, 16, "reached"), (0.051, 16, "missed"), (0.01, 8, "not measured")],
)
def test_headline_judges_sixteen_models_with_a_worker(share: float, num_models: int, verdict: str) -> None:
    made = result()
    made["rows"][2] |= {"wait_share": {"median": share}, "num_models": num_models}
    assert f"to reach: 5% with 16; {verdict}" in run.headline(made)


def test_text_without_clean_windows_has_no_figures() -> None:
    made = result() | run.summary([Side(name, 1, Windows([None])) for name in (OWN, LOOP, WORKER)])
    text = run.result_text(made)
    assert "reach" not in text
    assert text.count("–") == 8


def test_picture_has_the_lines_of_all_sides_and_modelbatchs_two_points() -> None:
    shares, speedups = plot.draw({"photos": result()}).axes
    by_label = {
        container.get_label(): [round(float(y), 6) for y in container.lines[0].get_ydata()]
        for container in shares.containers
    }
    assert by_label == {OWN: [80.0, 80.0], LOOP: [25.0], WORKER: [1.0]}
    (stars,) = [line for line in shares.lines if str(line.get_label()).startswith("ModelBatch")]
    assert list(stars.get_xdata()) == [1, 16]
    assert list(stars.get_ydata()) == pytest.approx([81.5, 1.94])
    assert [list(container.lines[0].get_ydata()) for container in speedups.containers] == [[1.0, 1.0], [5.0], [10.0]]


def test_measurement_from_the_command_line_writes_its_result(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(windows, "MAX_FOREIGN_SHARE", 2.0)
    monkeypatch.setattr(run, "WIDTH", 2)
    path = tmp_path / "photos.json"
    arguments = ["--folder", str(photos), "--models", "1", "2", "--rounds", "2", "--repetitions", "1"]
    assert run.main([*arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [(row["side"], row["num_models"], row["n"]) for row in written["rows"]] == [
        (OWN, 1, 1), (LOOP, 1, 1), (WORKER, 1, 1), (LOOP, 2, 1), (WORKER, 2, 1),
    ]  # fmt: skip
    assert all(row["images_per_s"] > 0 for row in written["rows"])
    assert written["rows"][0]["wait_share"]["median"] > 0
    assert (written["folder"], written["images"]) == ("photos", 9)
    assert "9 training images of photos, crops of 64 x 64" in capsys.readouterr().out
