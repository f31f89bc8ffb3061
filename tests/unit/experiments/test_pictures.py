"""Pictures of results: where they are drawn to, and what is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from experiments.bench import results
from experiments.bench.program import draw_after
from experiments.bench.results import write_result
from experiments.tables import pages, pictures
from experiments.tables.pictures import beside, draw_beside, draw_questions, one, pictures_of


@pytest.fixture
def two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a question that has them, and a `plot.py`."""
    for module in (pictures, results):
        monkeypatch.setattr(module, "EXPERIMENTS", tmp_path / "experiments")
    folder = tmp_path / "experiments" / "any"
    for name in ("a", "b"):
        write_result(folder / "results" / f"{name}.json", {"name": name})
    (folder / "plot.py").touch()
    return folder


def drawn_by(monkeypatch: pytest.MonkeyPatch, found: pictures.Pictures) -> None:
    monkeypatch.setitem(sys.modules, "experiments.any.plot", SimpleNamespace(PICTURES=found))


def test_picture_of_all_results_is_drawn_once(
    two_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[list[str]] = []
    drawn_by(monkeypatch, one("all.png", lambda found: drawn.append(list(found)) or Figure()))
    assert draw_questions(["any"]) == 0
    assert drawn == [["a", "b"]]
    assert (two_results / "all.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == "drawn to any/all.png\n".replace("any", "experiments/any")


def test_picture_is_drawn_beside_every_result(two_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    drawn_by(monkeypatch, beside(lambda result: drawn.append(result["name"]) or Figure()))
    assert draw_questions(["any"]) == 0
    assert drawn == ["a", "b"]
    assert {path.name for path in (two_results / "results").glob("*.png")} == {"a.png", "b.png"}


def test_picture_is_of_the_results_that_are_kept_and_of_none_without_one(
    two_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[list[str]] = []
    draw = lambda found: drawn.append(list(found)) or Figure()  # noqa: E731
    drawn_by(monkeypatch, one("all.png", draw, keep=lambda result: result["name"] == "b"))
    assert draw_questions(["any"]) == 0
    assert drawn == [["b"]]
    drawn_by(monkeypatch, one("all.png", draw, keep=lambda _: False))
    assert draw_questions(["any"]) == 2
    assert "nothing to draw for any yet; see any/README.md" in capsys.readouterr().err


def test_picture_of_one_results_file_is_drawn_beside_it(
    two_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_by(monkeypatch, beside(lambda result: Figure()))
    draw_beside("any", tmp_path / "mine.json", {"name": "mine"})
    assert (tmp_path / "mine.png").is_file()


def test_picture_after_a_result_is_left_out_with_a_hint_where_it_cannot_be_drawn(
    two_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "experiments.tables.pictures", None)
    draw_after("any", two_results / "results" / "a.json")
    assert capsys.readouterr().out.endswith("pip install '.[plots]', then python experiments/tables --pictures any\n")


@pytest.mark.parametrize("question", pages.questions())
def test_every_question_with_a_picture_on_its_page_can_draw_it(question: str) -> None:
    folder = pictures.EXPERIMENTS / question
    shown = {f"results/{path.name}" for path in (folder / "results").glob("*.png")}
    found = pictures_of(question)
    assert shown <= set(found(results.read_results(question)) if found else ())
