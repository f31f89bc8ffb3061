"""The page: everything is in it, nothing is loaded, and what a folder says is text and not HTML."""

from __future__ import annotations

import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.report.charts import all_charts
from crossbow_py.report.page import as_html
from crossbow_py.report.reading import RunRecord, read_runs
from crossbow_py.telemetry.class_counts import ClassCounts
from tests.made_up_ranks import write_job
from tests.run_folders import write_run, write_trace, write_unfinished

NOW = datetime(2026, 1, 2, 3, 4)
VOID = {"meta", "img"}


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def page(folders: list[Path]) -> str:
    runs = read_runs(folders)
    return as_html(runs, list(all_charts(runs)), NOW)


def headings(text: str) -> list[str]:
    return re.findall(r"<h[12]>(.*?)</h[12]>", text)


def test_page_of_one_run_has_its_charts_decisions_and_timeline_and_loads_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "digits" / "a")
    write_trace(folder)
    text = page([folder])
    assert headings(text) == [
        "digits/a", "Accuracy", "Accuracy over time", "Loss", "Throughput and learners", "Averaging", "Learning rate",
        "Three rounds of the timeline", "Decisions of the auto-tuner",
    ]  # fmt: skip
    assert "1 → 2 learners: 250 images/s with 1." in text
    assert set(re.findall(r'(?:src|href)="([^:"]+):', text)) == {"data"}
    assert "<script" not in text
    assert "<link" not in text
    balance = Balance(text)
    assert (balance.open, balance.wrong) == ([], [])


@pytest.mark.slow
def test_page_of_two_runs_shows_in_what_they_differ(tmp_path: Path) -> None:
    text = page([write_run(tmp_path / "a", "seed=1"), write_unfinished(tmp_path / "b", "seed=2")])
    assert "Differences in configuration" in headings(text)
    assert re.search(r"<td>seed</td><td>1</td><td>2</td>", text)
    assert "b: no summary.json" in text
    assert "<td>batch_size</td>" not in text


def cats_and_dogs(right: int, of_positions: bool = False, size: int = 2) -> ClassCounts:
    counts = np.zeros((size, size + 1), dtype=np.int64)
    counts[0, :2] = right, 4 - right
    return ClassCounts(counts, ("cat", "<dog>"), of_positions)


@pytest.mark.slow
def test_page_of_a_run_with_classes_has_their_figures_and_confusions(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "digits" / "a", class_counts=cats_and_dogs(3))
    text = page([folder])
    assert headings(text)[-3:] == ["Confusion matrix", "Classes", "Decisions of the auto-tuner"]
    assert "<td>cat</td><td>1.0000</td><td>0.7500</td><td>0.8571</td><td>4</td>" in text
    assert "<td>&lt;dog&gt;</td><td>0.0000</td><td>–</td><td>0.0000</td><td>0</td>" in text
    assert "<td>mean of the classes</td><td>0.5000</td><td>0.7500</td><td>0.4286</td><td>4</td>" in text
    assert "IoU" not in text and "<details><summary>Classes" not in text
    assert '<figure class="wide">' in text
    balance = Balance(text)
    assert (balance.open, balance.wrong) == ([], [])


@pytest.mark.slow
def test_page_of_several_runs_compares_the_f1_of_their_classes_or_the_iou_of_masks(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", class_counts=cats_and_dogs(3)),
        write_unfinished(tmp_path / "b", class_counts=cats_and_dogs(4)),  # whose file of the matrix alone is there
        write_run(tmp_path / "c", epochs=1),
    ]
    text = page(folders)
    assert "F1 of the classes" in headings(text)
    assert re.findall("<details><summary>(Confusion.*?)</summary>", text) == [
        "Confusion matrix: a", "Confusion matrix: b",
    ]  # fmt: skip
    balance = Balance(text)
    assert (balance.open, balance.wrong) == ([], [])
    assert "<td>cat</td><td>0.8571</td><td>1.0000</td><td>–</td>" in text
    assert "<td>mean of the classes</td><td>0.4286</td><td>1.0000</td><td>–</td>" in text
    masks = [write_run(tmp_path / name, class_counts=cats_and_dogs(3, of_positions=True)) for name in "de"]
    assert "<td>cat</td><td>0.7500</td><td>0.7500</td>" in page(masks)
    assert "IoU of the classes" in page(masks)


@pytest.mark.slow
def test_many_classes_are_folded_up(tmp_path: Path) -> None:
    text = page([write_run(tmp_path / "a", class_counts=cats_and_dogs(3, size=26))])
    assert "<details><summary>Classes, 26 of them</summary>" in text


@pytest.mark.parametrize("saved", [3, [], [3], [{"name": 3}], [{}], {"name": "a"}])
def test_damaged_figures_of_classes_are_those_of_the_matrix(saved: object) -> None:
    run = RunRecord(
        name="a", folder=Path("a"), status="finished", summary={"per_class": saved}, class_counts=cats_and_dogs(3)
    )
    assert "<td>cat</td><td>1.0000</td><td>0.7500</td><td>0.8571</td><td>4</td>" in as_html([run], [], NOW)


@pytest.mark.parametrize("where", ["name", "note", "config", "decision", "summary"])
def test_what_a_folder_says_is_shown_as_text(where: str) -> None:
    evil = "<script>alert(1)</script>"
    run = RunRecord(
        name=evil if where == "name" else "a", folder=Path("a"), status="finished",
        config={"seed": evil if where == "config" else 1},
        decisions=[{"reason": evil if where == "decision" else "", "samples_seen": 1, "elapsed_s": 1}],
        summary={"model": evil if where == "summary" else "mlp"},
        notes=[evil] if where == "note" else [],
    )  # fmt: skip
    text = as_html([run], [], NOW)
    assert "&lt;script&gt;" in text
    assert evil not in text


def test_page_of_a_run_without_any_epoch_has_no_charts(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    assert headings(page([folder])) == [f"{tmp_path.name}/a"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "is_open"), [(8, True), (24, False)])
def test_page_of_many_ranks_has_the_slowest_first_and_its_curve(tmp_path: Path, num_ranks: int, is_open: bool) -> None:
    text = page([write_job(tmp_path / "run", num_ranks, synchronisations=24)])
    assert "The slowest rank" in headings(text)
    assert ("The ranks" in headings(text)) is is_open
    assert (f"<summary>The ranks, {num_ranks} of them</summary>" in text) is not is_open
    rows = text.split("<th>waiting for ranks</th>", 1)[1].split("</table>", 1)[0].split("<tr>")[1:]
    assert len(rows) == num_ranks
    assert rows[0].startswith("<td>5</td><td>gpu-0</td>")
    assert re.search(r"<td>slowest rank</td><td>5 on gpu-0 \(\+\d+\.\d%\)</td>", text)
    assert Balance(text).wrong == []


@pytest.mark.slow
def test_page_names_the_ranks_that_hung(tmp_path: Path) -> None:
    hanging = [HangingRank(3, "gpu-<1>", 7, "round 5", "12:00", 3.0), HangingRank(4, "b", 8, "round 5", "12:00", 3.0)]
    text = page([write_run(tmp_path / "a", summary={"status": "failed", "hanging_ranks": tuple(hanging)})])
    assert "<td>ranks that hung</td><td>3 on gpu-&lt;1&gt;, 4 on b</td>" in text
