"""Grids of training runs: cells and what identifies them, means and their confidence, tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossbow_py.core import intervals
from experiments.grids import grid as of_files
from experiments.grids import plot, report
from experiments.grids.grid import Cell, Grid, chosen, in_turns, merged, said_of, settings_of
from experiments.grids.parts import stops
from experiments.grids.running import ends_of
from tests.unit.experiments.pretended_run import epochs_of, summary_of
from tests.unit.experiments.samples import cells as table_cells

MACHINE = {"cpu": "any", "cores": 2, "gpus": [], "torch": "2", "date": "2026-01-01", "commit": "abc"}


def made_up(cell: str, seed: int, accuracy: float | None, alone: bool = True) -> dict[str, Any]:
    """A run; a diverged one without an accuracy."""
    return {
        "cell": cell, "labels": {}, "seed": seed, "program": "p", "parts": 1, "machine": MACHINE,
        "status": "finished" if accuracy else "failed", "alone": alone, "foreign_share": 0.04 if alone else None,
        "summary": summary_of(accuracy), "epochs": epochs_of(accuracy or 0.0),
    }  # fmt: skip


def made_up_result(alone: bool = True) -> dict[str, Any]:
    accuracies = {"one": (0.9, 0.92), "sma": (0.94, 0.92), "wild": (0.8, None)}
    runs = [made_up(name, seed, own, alone) for name, pair in accuracies.items() for seed, own in enumerate(pair)]
    return {"machine": MACHINE, "grid": "digits", "title": "MLP", "targets": [0.91], "reference": "one",
            "num_cells": 4, "runs": runs}  # fmt: skip


def test_overrides_of_the_same_key_are_replaced_in_their_place() -> None:
    assert merged(["+experiment=lenet", "a=1", "b.c=2"], ["a=3"], ["d=4", "b.c=5"]) == (
        "+experiment=lenet", "a=3", "b.c=5", "d=4",
    )  # fmt: skip


def test_cells_of_a_file_have_the_common_overrides_those_of_their_side_and_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "grids.yaml").write_text("""
        fragments: {first: a=1, both: $first b=2}
        grids:
          g:
            title: Any
            common: $both
            parts: 4
            cells:
              - {x: b=3, y: c=1}
              - {y: ""}
              - {side: s, common: c=2, program: other, of: {x: a=5}}
            targets: [0.5]
    """)
    monkeypatch.setattr(of_files, "EXPERIMENTS", tmp_path)
    assert of_files.read_grids("any") == {
        "g": Grid("g", "Any", targets=(0.5,), cells=(
            Cell("x", ("a=1", "b=3"), parts=4), Cell("y", ("a=1", "b=2"), parts=4),
            Cell("s, x", ("a=5", "b=2", "c=2"), "s", program="other", parts=4),
        )),
    }  # fmt: skip


def test_cell_is_known_by_what_is_run_and_not_by_its_name() -> None:
    cell = Cell("x", ("+experiment=digits", "max_epochs=2", "seed=1"))
    same = ("+experiment=digits", "seed=1", "optimizer.nesterov=false", "max_epochs=2")  # which it is by default
    assert cell.key == Cell("y", same, side="s").key
    others = [Cell("x", same[:2]), Cell("x", cell.overrides, parts=2), Cell("x", cell.overrides, program="other")]
    assert len({each.key for each in (cell, *others)}) == 4


def test_settings_of_a_cell_are_those_that_a_recipe_or_an_override_sets() -> None:
    overrides = ("+experiment=digits", "averaging=diloco", "averaging.outer_momentum=0.5", "seed=3")
    found = said_of(overrides)
    assert found["averaging"] == {"name": "diloco", "outer_momentum": 0.5}
    assert found["max_epochs"] == 20 and "executor" not in found
    assert "averaging.outer_momentum=0.5" in settings_of(overrides)
    assert settings_of(overrides) == settings_of((*overrides[:3], "seed=4"))
    assert Cell("rate · √K, K=4", ()).folder.startswith("rate_K_K_4-")


def test_record_is_of_a_cell_unless_a_default_has_changed() -> None:
    cell = Cell("x", ("+experiment=digits", "averaging=sma"))
    record = {"program": cell.program, "parts": 1, "settings": cell.settings}
    assert cell.is_of(record) and not cell.is_of({**record, "parts": 2})
    assert "averaging.rate_scaling=sqrt averaging." in cell.settings
    assert cell.is_of({**record, "settings": cell.settings.replace("averaging.rate_scaling=sqrt ", "")})
    assert not cell.is_of({**record, "settings": cell.settings.replace("rate_scaling=sqrt", "rate_scaling=none")})
    assert not cell.is_of({**record, "settings": cell.settings + " of_old=1"})
    smoothed = Cell("x", (*cell.overrides, "averaging.average_ema=0.2"))
    assert not smoothed.is_of({**record, "settings": smoothed.settings.replace("averaging.average_ema=0.2 ", "")})


def test_command_is_that_of_training_unless_there_are_parts_or_another_program() -> None:
    after = ["a=1", "seed=3", "output_dir='out'", "resume=auto"]
    assert Cell("x", ("a=1",)).command(3, "out") == ["crossbow_py.train", *after]
    assert Cell("x", ("a=1",), parts=4).command(3, "out") == ["experiments.grids.parts", "4", *after]
    assert Cell("x", ("a=1",), program="other").command(3, "out") == ["other", "1", *after]


def test_more_overrides_are_for_every_cell() -> None:
    grid = Grid("g", "", (Cell("x", ("a=1",)), Cell("y", ("a=1", "b=1")))).with_overrides(["a=2"])
    assert [cell.overrides for cell in grid.cells] == [("a=2",), ("a=2", "b=1")]


def test_cells_are_chosen_by_pattern_and_one_that_matches_none_is_refused() -> None:
    grid = Grid("g", "", tuple(Cell(name, ()) for name in ("sma, K=2", "sma, K=4", "papa")))
    assert [cell.name for cell in chosen(grid, "sma*")] == ["sma, K=2", "sma, K=4"]
    with pytest.raises(ValueError, match="no cell of g matches 'x'; there are sma, K=2; sma, K=4; papa"):
        chosen(grid, "x")


def test_seeds_take_turns_in_one_order_and_then_the_other() -> None:
    a, b = Cell("a", ()), Cell("b", ("x=1",))
    assert in_turns([a, b], (5, 6, 7)) == [(a, 5), (b, 5), (b, 6), (a, 6), (a, 7), (b, 7)]


def test_parts_end_at_fractions_of_an_epoch_and_at_the_end() -> None:
    assert stops(1.0, 1) == [1.0]
    assert stops(0.75, 4) == [0.25, 0.5, 0.75]
    assert stops(1.2, 2) == [0.5, 1.0, 1.2]


def test_confidence_interval_is_that_of_students_t() -> None:
    found = intervals.estimate([1.0, 2.0, 3.0])
    assert found is not None and found.half_width is not None
    # 4.303 · 1 / √3
    assert (found.mean, found.n, found.half_width) == (2.0, 3, pytest.approx(2.4843, abs=1e-4))
    assert intervals.estimate([2.0]) == intervals.Estimate(2.0, 1, None)
    assert intervals.estimate([]) is None
    assert str(intervals.estimate([1.0, float("nan")])) == "nan"  # which tables show


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (4, 2.776), (30, 2.042), (40, 2.021), (120, 1.980)])
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert intervals.student_t(degrees) == pytest.approx(quantile, abs=2e-3)


def test_summary_leaves_out_what_diverged_and_counts_it() -> None:
    one, sma, wild = report.summaries(made_up_result())
    assert one.final is not None and one.final.mean == pytest.approx(0.91)
    assert (sma.n, sma.diverged, wild.n, wild.diverged) == (2, 0, 2, 1)
    assert wild.final == intervals.Estimate(0.8, 1, None)


def test_target_is_reached_at_the_first_evaluation_that_has_it_and_seconds_are_of_runs_alone() -> None:
    runs = [made_up("x", 0, 0.92), made_up("x", 1, 0.94, alone=False), made_up("x", 2, 0.8)]
    assert report.reached(runs, 0.91) == report.Reached(n=2, epochs=2, samples=200, seconds=3.0)
    assert report.reached(runs, 0.99) == report.Reached(0, None, None, None)


def test_difference_is_taken_seed_by_seed_where_both_finished() -> None:
    runs = report.by_cell(made_up_result())
    found = report.difference(runs["sma"], runs["one"])
    # +0.04 and 0: sd 0.0283, 12.706 · 0.0283 / √2
    assert found is not None and found.mean == pytest.approx(0.02)
    assert found.half_width == pytest.approx(0.25412)
    alone = report.difference(runs["wild"], runs["one"])
    assert alone is not None and (alone.mean, alone.n) == (pytest.approx(-0.1), 1)


def test_average_model_has_a_row_of_its_own_where_an_ema_of_it_was_evaluated() -> None:
    result = made_up_result() | {"shown_after": [1.0]}
    broke = made_up("sma", 1, None) | {"epochs": []}
    result["runs"] = [made_up("one", 0, 0.9), made_up("sma", 0, 0.95), broke]
    for run, accuracies in zip(result["runs"], ((0.5, 0.7), (0.6, 0.8)), strict=False):
        for record, z_accuracy in zip(run["epochs"], accuracies, strict=True):
            record["z_accuracy"] = z_accuracy
    before = result["runs"][1]["epochs"][0]["test_accuracy"]
    rows = [table_cells(report.cells_table(result), row) for row in range(2, 6)]
    assert [row[0] for row in rows] == ["one", "one, EMA", "sma", "sma, EMA"]
    assert [row[3] for row in rows] == ["0.7000", "0.9000", "0.8000", "0.9500"]
    assert [row[5] for row in rows] == ["", "", "+0.1000", "+0.0500"]  # z to z, an EMA to an EMA
    assert [rows[2][6], rows[3][6]] == ["0.6000", f"{before:.4f}"]
    assert [row[-2:] for row in rows[2:]] == [["2", "1"], ["2", "1"]]
    assert "3 runs of 2 cells" in report.notes(result)


def test_curve_is_the_mean_over_seeds_as_far_as_all_go() -> None:
    runs = [made_up("x", 0, 0.8), made_up("x", 1, 0.9), made_up("x", 2, None)]
    runs[1]["epochs"] = runs[1]["epochs"][:1]
    samples, accuracy = report.mean_curve(runs)
    assert (samples, accuracy) == ([100], [pytest.approx(0.425)])


def test_table_has_a_row_a_cell_and_says_what_diverged() -> None:
    table = report.cells_table(made_up_result())
    assert table_cells(table, 0) == [
        "", "K", "b", "test accuracy", "best", "− one", "epochs to 0.91", "seconds to 0.91", "n", "diverged",
    ]  # fmt: skip
    assert table_cells(table, 2) == [
        "one", "4", "16", "0.9100 ± 0.1271", "0.9100 ± 0.1271", "", "2.00 (1 of 2)", "3.0 (1 of 2)", "2", "",
    ]  # fmt: skip
    assert table_cells(table, 4) == ["wild", "4", "16", "0.8000", "0.8000", "-0.1000", "–", "–", "2", "1"]


def test_picture_says_which_cells_are_outside_of_it() -> None:
    result = made_up_result()
    result["runs"] = [made_up("good", seed, 0.95) for seed in range(20)] + [made_up("bad", 0, 0.1)]
    result["runs"] += [made_up("worse", 0, None)]
    finals = plot.draw_accuracies(result).axes[0]
    assert [text.get_text().strip() for text in finals.texts] == ["diverged", "← 0.1000"]


def test_runs_that_broke_do_not_say_how_far_axes_go() -> None:
    result = made_up_result()
    result["runs"] = [made_up("one", seed, 0.9 + 0.01 * seed) for seed in range(2)]
    alone = plot.draw_accuracies(result).axes
    result["runs"] += [made_up("broke", seed, 0.1) for seed in range(6)]
    finals, curves = plot.draw_accuracies(result).axes
    assert (finals.get_xlim(), curves.get_ylim()) == (alone[0].get_xlim(), alone[1].get_ylim())
    assert "← 0.1000" in [text.get_text().strip() for text in finals.texts]


def test_results_without_curves_keep_what_tables_of_targets_read() -> None:
    epochs = [{"epoch": own, "test_accuracy": accuracy} for own, accuracy in enumerate([0.2, 0.5, 0.4, 0.7, 0.6, 0.3])]
    assert ends_of({"epochs": epochs}, [0.45, 0.65]) == [epochs[1], epochs[3], epochs[5]]
    assert ends_of({"epochs": epochs}, [0.9]) == [epochs[5]]
