"""Pictures of results: where they are drawn to, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.bench import results
from experiments.bench.results import write_result
from experiments.tables import pictures
from experiments.tables.pictures import draw_beside, save_picture, save_pictures


@pytest.fixture
def two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an experiment that has them."""
    for module in (pictures, results):
        monkeypatch.setattr(module, "EXPERIMENTS", tmp_path / "experiments")
    folder = tmp_path / "experiments" / "any"
    for name in ("a", "b"):
        write_result(folder / "results" / f"{name}.json", {"name": name})
    return folder


def test_picture_of_all_results_is_drawn_once(two_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[list[str]] = []
    assert save_picture("any", "all.png", lambda found: drawn.append(list(found)) or Figure()) == 0
    assert drawn == [["a", "b"]]
    assert (two_results / "all.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == "drawn to experiments/any/all.png\n"


def test_picture_is_drawn_beside_every_result(two_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[str] = []
    assert save_pictures("any", lambda result: drawn.append(result["name"]) or Figure()) == 0
    assert drawn == ["a", "b"]
    assert {path.name for path in (two_results / "results").glob("*.png")} == {"a.png", "b.png"}
    assert capsys.readouterr().out.splitlines() == [f"drawn to experiments/any/results/{name}.png" for name in "ab"]


def test_picture_is_of_the_results_that_are_kept_and_of_none_without_one(
    two_results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[list[str]] = []
    keep_b = {"draw": lambda found: drawn.append(list(found)) or Figure(), "keep": lambda result: result["name"] == "b"}
    assert save_picture("any", "all.png", **keep_b) == 0
    assert drawn == [["b"]]
    assert save_picture("any", "all.png", Figure, keep=lambda _: False) == 2
    assert "no results yet; run experiments/any/run.py first" in capsys.readouterr().err


def test_picture_of_one_results_file_is_drawn_beside_it(two_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[str] = []
    path = two_results / "results" / "a.json"
    assert draw_beside("Draws.", lambda result: drawn.append(result["name"]) or Figure(), [str(path)]) == 0
    assert drawn == ["a"]
    assert capsys.readouterr().out == f"drawn to {path.with_suffix('.png')}\n"


def test_picture_after_a_result_is_left_out_with_a_hint_where_it_cannot_be_drawn(
    two_results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.draw_after(two_results, "experiments.absent.plot")
    assert capsys.readouterr().out.endswith(
        f"pip install '.[plots]', then python experiments/absent/plot.py {two_results}\n"
    )
