"""TensorBoard and the report as a browser shows them; where Chromium is there."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crossbow_py.report import __main__ as report
from docs.screenshots import PAGES, browser, screenshot, tensorboard
from tests.run_folders import write_run, write_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(browser() is None, reason="no Chromium on the path"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose runs/ holds two runs."""
    folder = tmp_path_factory.mktemp("shown")
    for name, epochs in (("a", 5), ("b", 8)):
        write_trace(write_run(folder / "runs" / name, f"seed={epochs}", epochs=epochs))
    return folder


def ask(address: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{address}data/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.loads(answer.read())


def colours(picture: Path, left: int = 0, top: int = 0) -> np.ndarray:
    """Its pixels from there on, [N, 3]."""
    return np.asarray(Image.open(picture).convert("RGB"))[top:, left:].reshape(-1, 3).astype(int)


def share_of_strong_colours(picture: Path, left: int = 0, top: int = 0) -> float:
    """Of pixels that are neither grey nor pale: curves, bars and frames."""
    pixels = colours(picture, left, top)
    return float(((pixels.max(1) - pixels.min(1)) > 80).mean())


def test_dashboard_is_loaded_and_every_chart_has_curves_of_both_runs(runs: Path, tmp_path: Path) -> None:
    with tensorboard(runs / "runs") as address:
        names = ask(address, "runs")
        layout = ask(address, "plugin/custom_scalars/layout")
        charts = {chart["title"]: chart["multiline"]["tag"] for part in layout["category"] for chart in part["chart"]}
        assert len(charts) >= 8
        # The machine is sampled only while a run goes on for seconds.
        for title in [title for title in charts if title not in ("memory (GiB)", "busy CPU cores")]:
            for name in names:
                found = [ask(address, "plugin/custom_scalars/scalars", run=name, tag=tag) for tag in charts[title]]
                assert any(points for each in found for points in each["tag_to_events"].values()), (title, name)
        page, size = PAGES["tensorboard"]
        screenshot(f"{address}#{page}", tmp_path / "dashboard.png", size)
        screenshot(f"{address}#graphs", tmp_path / "nothing.png", size)  # of which runs have none
    beside_the_bars = {"left": 380, "top": 80}
    shown = share_of_strong_colours(tmp_path / "dashboard.png", **beside_the_bars)
    assert shown > 2 * share_of_strong_colours(tmp_path / "nothing.png", **beside_the_bars)


def test_report_shows_its_charts_in_a_browser(runs: Path, tmp_path: Path) -> None:
    assert report.main([str(runs / "runs"), f"output_dir={tmp_path / 'report'}"]) == 0
    screenshot((tmp_path / "report" / "report.html").as_uri(), tmp_path / "shown.png", (1200, 2400))
    assert share_of_strong_colours(tmp_path / "shown.png") > 0.005
    found = {tuple(pixel) for pixel in colours(tmp_path / "shown.png")[::7]}
    for wanted in ((0x4C, 0x78, 0xA8), (0xF5, 0x85, 0x18), (0x54, 0xA2, 0x4B)):  # learning, correction, averaging
        assert min(sum(abs(a - b) for a, b in zip(wanted, pixel, strict=True)) for pixel in found) < 40
