"""`python -m crossbow_py.report`, on a run that was trained and on folders in all states."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from crossbow_py.report import __main__ as report
from crossbow_py.train import __main__ as train
from tests.run_folders import write_run, write_unfinished
from tests.said import error_line

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.mark.slow
def test_report_of_a_traced_run_is_a_page_with_pictures_in_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+experiment=digits", "+debug=fast", "trace=true", "executor=threads", "device=cpu", "output_dir=run"]
    assert train.main(arguments) == 0
    capsys.readouterr()
    assert report.main(["run"]) == 0
    assert capsys.readouterr().out == "Written to run/report/report.html, with its charts as PNG beside it.\n"
    names = {path.name for path in Path("run/report").iterdir()}
    assert {"report.html", "accuracy.png", "loss.png", "throughput.png", "averaging.png", "timeline.png"} <= names
    assert Path("run/report/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert train.main([*arguments, "resume=auto"]) == 0  # a report is in nobody's way


@pytest.mark.slow
def test_report_of_several_runs_has_a_folder_of_its_own_or_the_one_that_is_asked_for() -> None:
    write_run(Path("runs/digits/a"))
    write_unfinished(Path("runs/digits/b"))
    assert report.main(["runs/digits"]) == 0
    assert Path("runs/digits/report/report.html").is_file()
    assert report.main(["runs/digits/a", "runs/digits/b"]) == 0
    assert len(list(Path("runs/report").glob("*/report.html"))) == 1
    assert report.main(["runs/digits/a", "runs/digits/b", "output_dir=compared"]) == 0
    assert Path("compared/report.html").is_file()


@pytest.mark.slow
def test_report_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    write_unfinished(Path("b"))
    assert report.main(["b"]) == 0
    assert "no summary.json: the run goes on, or was killed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "of at least one run"),
        (["none"], "none does not exist"),
        (["empty"], "empty holds no run"),
        (["a", "title=x"], "unknown key title=x"),
        (["title=x"], "unknown key title=x"),
        (["a", f"title={'x' * 300}"], "unknown key title=xxx"),
        (["x" * 300], "RUN must have names of at most 255 bytes"),
        (["a", "--open"], "unknown option --open"),
        (["~nobody-there/a"], "RUN=~nobody-there/a is in the home folder of an unknown user"),
        (["a", "output_dir=~nobody-there/b"], "output_dir=~nobody-there/b is in the home folder of an unknown user"),
        (["a", "output_dir=" + "x" * 300], "output_dir must have names of at most 255 bytes"),
        (["a", "output_dir=/proc/none"], "output_dir /proc/none cannot be written"),
    ],
)
def test_mistakes_end_with_one_line_and_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    write_run(Path("a"), epochs=1)
    assert report.main(arguments) == 2
    assert words in error_line(capsys)
    assert not (Path("a") / "report").exists()


def test_without_matplotlib_the_remedy_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(Path("a"), epochs=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.main(["a"]) == 2
    assert "pip install matplotlib" in error_line(capsys)


def test_help_is_shown_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--help"]) == 0
    assert "usage: python -m crossbow_py.report RUN" in capsys.readouterr().out
    assert list(Path().iterdir()) == []
