"""The charts, looked at through matplotlib."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.report.charts import all_charts, colour, typical_rounds
from crossbow_py.report.reading import RunRecord, Span, read_runs
from tests.run_folders import write_run, write_trace

EPOCHS = [{"samples_seen": 1000 * n, "elapsed_s": n, "test_accuracy": n / 4, "validation_accuracy": None,
           "images_per_s": 100.0, "num_learners": n, "train_loss": 1 / n, "data_wait_share": None}
          for n in (1, 2, 3)]  # fmt: skip


def charts(*runs: RunRecord) -> dict[str, list[list[tuple[float, float]]]]:
    """By name, the curves of all panels."""
    return {
        chart.name: [list(map(tuple, line.get_xydata())) for axes in chart.figure.axes for line in axes.get_lines()]
        for chart in all_charts(runs)
    }


def test_curves_are_those_of_the_epochs_where_there_is_no_event_file() -> None:
    found = charts(RunRecord(name="a", folder=Path("a"), status="finished", epochs=EPOCHS))
    assert list(found) == ["accuracy", "accuracy_by_time", "loss", "throughput"]
    assert found["accuracy"] == [[(1000, 0.25), (2000, 0.5), (3000, 0.75)]]
    assert found["accuracy_by_time"] == [[(1, 0.25), (2, 0.5), (3, 0.75)]]
    assert found["throughput"][1] == [(1000, 1), (2000, 2), (3000, 3)]


def test_throughput_of_language_models_is_in_tokens_where_all_runs_have_them() -> None:
    epochs = [{**line, "tokens_per_s": 500.0} for line in EPOCHS]
    of_text = RunRecord(name="a", folder=Path("a"), status="finished", epochs=epochs)
    of_images = RunRecord(name="b", folder=Path("b"), status="finished", epochs=EPOCHS)
    for runs, unit, value in (([of_text], "tokens/s", 500.0), ([of_text, of_images], "images/s", 100.0)):
        (chart,) = (each for each in all_charts(runs) if each.name == "throughput")
        assert chart.figure.axes[0].get_ylabel() == unit
        assert chart.figure.axes[0].get_lines()[0].get_ydata().tolist() == [value] * 3


def test_validation_accuracy_stands_where_it_was_measured() -> None:
    epochs = [{**line, "validation_accuracy": 0.125} for line in EPOCHS]
    found = charts(RunRecord(name="a", folder=Path("a"), status="finished", epochs=epochs))
    assert found["accuracy"] == [[(1000, 0.125), (2000, 0.125), (3000, 0.125)]]


def test_every_metric_has_a_chart_whose_name_is_that_of_a_file() -> None:
    epochs = [{**line, "metrics": {"top/3 $x": line["test_accuracy"]}, "metrics/top/3 $x": line["test_accuracy"]}
              for line in EPOCHS]  # fmt: skip
    found = charts(RunRecord(name="a", folder=Path("a"), status="finished", epochs=epochs))
    assert found["metric_0_top_3_x"] == [[(1000, 0.25), (2000, 0.5), (3000, 0.75)]]
    assert list(found).index("metric_0_top_3_x") == list(found).index("loss") + 1


def test_a_run_has_one_colour_in_every_chart_and_a_name_where_there_are_several() -> None:
    runs = [RunRecord(name=name, folder=Path(name), status="finished", epochs=EPOCHS) for name in "ab"]
    for chart in all_charts(runs):
        first = chart.figure.axes[0]
        assert {line.get_color() for line in first.get_lines()} == {colour(0), colour(1)}
        legend = first.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_training_has_a_colour_of_its_own_in_one_run_and_a_panel_of_its_own_in_several() -> None:
    epochs = [{**line, "train_accuracy": 0.1} for line in EPOCHS]
    runs = [RunRecord(name=name, folder=Path(name), status="finished", epochs=epochs) for name in "ab"]
    (test, training) = next(iter(all_charts(runs[:1]))).figure.axes[0].get_lines()
    assert (test.get_color(), training.get_color()) == (colour(0), colour(1))
    assert (test.get_linestyle(), training.get_linestyle()) == ("-", "--")
    panels = next(iter(all_charts(runs))).figure.axes
    assert [axes.get_ylabel() for axes in panels] == ["test accuracy", "training accuracy"]
    assert [len(axes.get_lines()) for axes in panels] == [2, 2]


def test_accuracy_axis_begins_where_runs_differ() -> None:
    epochs = [{"samples_seen": n, "elapsed_s": n, "test_accuracy": value}
              for n, value in enumerate((0.1, 0.97, 0.98, 0.98, 0.985, 0.99))]  # fmt: skip
    runs = [RunRecord(name=name, folder=Path(name), status="finished", epochs=epochs) for name in "ab"]
    axes = next(iter(all_charts(runs))).figure.axes[0]
    low, high = axes.get_ylim()
    assert 0.95 < low < 0.97 < 0.99 < high < 1.0
    assert "lower values cut off" in axes.get_ylabel()


def test_seeds_of_a_setting_are_a_mean_with_a_band() -> None:
    runs = [RunRecord(name=str(seed), folder=Path(str(seed)), status="finished", config={"seed": seed},
                      epochs=[{**line, "test_accuracy": seed / 10} for line in EPOCHS]) for seed in (1, 3)]  # fmt: skip
    (curve,) = charts(*runs)["accuracy_of_seeds"]
    assert [y for _, y in curve] == pytest.approx([0.2] * 3)
    assert "accuracy_of_seeds" not in charts(runs[0])


def test_timeline_shows_three_usual_rounds_with_a_row_a_stream(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", epochs=1)
    write_trace(folder)
    (chart,) = (each for each in all_charts(read_runs([folder])) if each.name == "timeline")
    (axes,) = chart.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["learner 0", "learner 1", "averaging"]
    bars = [bar for container in axes.containers for bar in container]
    assert len(bars) == 3 * 5
    lengths = sorted({round(bar.get_width(), 3) for bar in bars})
    assert lengths == pytest.approx([2.0, 8.0])
    assert "round 1" in axes.get_xlabel()


def rounds(*lengths: float, first: int = 0) -> list[Span]:
    """One stream, rounds one behind the other."""
    spans, begin = [], 0.0
    for index, length in enumerate(lengths, start=first):
        spans.append(Span("learning", "learner 0", begin, begin + length, index))
        begin += length
    return spans


def test_typical_rounds_are_those_of_the_median_length() -> None:
    # By threes: 120, 30, 30, 30, 70, ... from each first round on: the first of those with the median is round 1.
    strip = typical_rounds(rounds(100, 10, 10, 10, 10, 50, 10, 10, 10, 10))
    assert strip is not None
    assert (strip.first_round, strip.start_us, len(strip.spans)) == (1, 100.0, 3)


def test_typical_rounds_of_a_short_trace_are_what_there_is() -> None:
    strip = typical_rounds(rounds(5, 6, first=7))
    assert strip is not None
    assert (strip.first_round, len(strip.spans)) == (7, 2)
    assert typical_rounds([]) is None
    assert typical_rounds([Span("evaluation", "host", 0, 1, None)]) is None
