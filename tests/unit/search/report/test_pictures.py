"""The two pictures: what is in them, where lines go, and labels that do not lie over one another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from crossbow_py.search.hyperband import make_brackets
from crossbow_py.search.report.listeners import SearchPictures
from crossbow_py.search.report.pictures import (
    NOTHING,
    draw_curves,
    draw_parallel,
    heights_of,
    parameter_ticks,
)
from crossbow_py.search.space import Parameter

PNG = b"\x89PNG\r\n\x1a\n"


def _texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_pictures_are_written_and_said(tmp_path: Path, searched: Any) -> None:
    said: list[str] = []
    SearchPictures(tmp_path, said.append).on_end(searched.summary())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_curves.png", "parallel_coordinates.png"]
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())
    assert said == [f"Pictures: parallel_coordinates.png and learning_curves.png in {tmp_path}."]


def test_pictures_without_matplotlib_are_left_out_and_that_is_said(
    tmp_path: Path, searched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    SearchPictures(tmp_path, said.append).on_end(searched.summary())
    assert said == ["No pictures: matplotlib is not there; pip install matplotlib."]
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_a_search_without_values_are_not_drawn(tmp_path: Path, searched: Any) -> None:
    SearchPictures(tmp_path, print).on_end(searched.summary(trials=(searched.trial(3),)))
    assert list(tmp_path.iterdir()) == []


def test_pictures_that_cannot_be_written_do_not_end_the_search(tmp_path: Path, searched: Any) -> None:
    said: list[str] = []
    SearchPictures(tmp_path / "gone", said.append).on_end(searched.summary())
    assert said == [f"No pictures were written to {tmp_path / 'gone'} (No such file or directory)."]


def test_places_of_a_trial_follow_the_ranges_and_go_below_where_there_is_nothing(searched: Any) -> None:
    parameters = searched.info().space.parameters
    # sgd is the first choice, 0.01 the middle of 0.001 to 0.1 by logarithm, 0.9 the upper end; 0.25 as given
    optimizer, *others = heights_of(parameters, searched.trial(1), 0.25)
    assert optimizer == pytest.approx(0.0, abs=0.025)
    assert others == pytest.approx([0.5, 1.0, 0.25])
    # adamw has no momentum, and there is no value
    optimizer, *others = heights_of(parameters, searched.trial(2), None)
    assert optimizer == pytest.approx(1.0, abs=0.025)
    assert others == pytest.approx([1.0, NOTHING, NOTHING])


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (Parameter(key="a", low=0.001, high=1.0, log=True), {"0.001": 0, "0.01": 1 / 3, "0.1": 2 / 3, "1": 1}),
        (Parameter(key="a", low=0, high=4), {"0": 0, "1": 0.25, "2": 0.5, "3": 0.75, "4": 1}),
        (Parameter(key="a", low=0.0, high=0.9, step=0.3), {"0": 0, "0.3": 1 / 3, "0.6": 2 / 3, "0.9": 1}),
        (Parameter(key="a", choices=(True, None, "a" * 20)), {"true": 0, "null": 0.5, "a" * 13 + "…": 1}),
    ],
)
def test_ticks_of_a_parameter_are_round_numbers_steps_or_choices(
    parameter: Parameter, expected: dict[str, float]
) -> None:
    found = {text: place for place, text in parameter_ticks(parameter)}
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()))


def test_parallel_coordinates_name_axes_best_and_kinds_of_lines(searched: Any) -> None:
    figure = draw_parallel(searched.info(), searched.trials())
    for text in ("optimizer", "learning\nrate", "momentum", "validation\naccuracy", "best: trial 1, 0.875", "not set",
                 "thin, coloured by value: stopped early, value where it stopped", "failed, or not measured yet",
                 "no value"):  # fmt: skip
        assert text in _texts(figure)
    # the best is the only one, and has its own line
    assert not any("trained to the end" in text for text in _texts(figure))


def test_curves_have_a_line_for_each_trial_and_count_those_measured_at_each_rung(searched: Any) -> None:
    axes = draw_curves(searched.info(), searched.trials()).axes[0]
    best = max(axes.lines, key=lambda line: line.get_linewidth())
    assert list(best.get_xdata()) == [1.0, 2.0, 4.0]
    assert list(best.get_ydata()) == [0.75, 0.8, 0.875]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1\n3 trials", "2\n2 trials", "4\n1 trial"]
    assert axes.get_xscale() == "linear"


def test_curves_of_distant_rungs_have_epochs_by_logarithm(searched: Any) -> None:
    brackets = make_brackets("successive_halving", num_trials=4, min_epochs=1, max_epochs=9, eta=3)
    info = searched.info(brackets=brackets)
    assert draw_curves(info, [searched.trial(0)]).axes[0].get_xscale() == "log"


def test_parallel_coordinates_draw_the_best_above_all_others_and_pruned_ones_faint(searched: Any) -> None:
    axes = draw_parallel(searched.info(), searched.trials()).axes[0]
    trials = [line for line in axes.lines if len(line.get_xdata()) == 4]  # three parameters and the value
    assert len(trials) == 4
    best = max(trials, key=lambda line: line.get_linewidth())
    assert best.get_zorder() == max(line.get_zorder() for line in trials)
    assert float(best.get_ydata()[-1]) == 1.0
    assert [line.get_alpha() for line in trials].count(0.6) == 2


def _overlaps(figure: Figure) -> list[tuple[str, str]]:
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    boxes = [(text, box) for text, box in boxes if box.width > 1]
    return [(a, b) for n, (a, box) in enumerate(boxes) for b, other in boxes[n + 1 :] if box.overlaps(other)]


@pytest.mark.parametrize("draw", [draw_parallel, draw_curves])
@pytest.mark.parametrize("maximize", [True, False])
def test_labels_of_a_picture_do_not_lie_over_one_another(searched: Any, draw: Any, maximize: bool) -> None:
    figure = draw(searched.info(maximize=maximize), searched.trials())
    figure.set_dpi(120)
    FigureCanvasAgg(figure)
    assert _overlaps(figure) == []
