"""Figures of packs: which sides and panels there are, tables and pictures of made-up results, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import workloads
from experiments.bench.packs import comparison
from experiments.model_batch import plot, run
from experiments.model_batch.run import FIGURES, sides_of
from tests.unit.experiments.packs import RATES, PretendedProcess


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is trained, and images are few and synthetic."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(workloads, "NUM_IMAGES", 64)
    monkeypatch.setattr(comparison, "SideProcess", PretendedProcess)
    monkeypatch.setattr(PretendedProcess, "visits", [])


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert run.main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize(("figure", "device", "expected"), [
    ("training", "cpu", ["default_loop 1", "tuned_single 1", "serial 1", "threads 16", "fused 16", "fused_threads 16"]),
    ("training", "cuda", ["default_loop 1", "tuned_single 1", "captured 1", "streams 16", "fused 16"]),
    ("inference", "cpu", [
        "default_loop 1", "tuned_single 1", "default_ensemble 16", "threads 16", "fused 16", "fused_threads 16",
    ]),
    ("inference", "cuda", ["default_loop 1", "tuned_single 1", "default_ensemble 16", "fused 16"]),
    ("layers", "cpu", ["default_loop 64", "tuned_single 64", "fused 64"]),
    ("limits", "cuda", ["default_loop 1", "tuned_single 1", "captured 1", "streams 4", "fused 4"]),
])  # fmt: skip
def test_sides_of_a_figure_are_one_model_at_a_time_and_packs(figure: str, device: str, expected: list[str]) -> None:
    sides = sides_of(FIGURES[figure], device)
    assert [f"{side.side} {side.num_learners}" for side in sides] == expected
    assert {side.work for side in sides} == {FIGURES[figure].work}


def test_result_has_a_panel_a_batch_size_and_a_headline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "mlp_training --batch-sizes 8 2 8 --num-models 3 --models lenet"
    result = measured(tmp_path, *words.split())
    assert [(row["batch_size"], row["side"]) for row in result["rows"][::6]] == [
        (8, "default_loop"),
        (2, "default_loop"),
    ]
    assert {row["num_models"] for row in result["rows"]} == {1, 3}
    assert {row["model"] for row in result["rows"]} == {"lenet"}
    assert (result["figure"]["num_models"], result["figure"]["panels"]) == ([3], [["lenet", 8], ["lenet", 2]])
    said = capsys.readouterr().out
    assert "gain over default_loop is 5.00 (5.00–5.00), of 3 lenet with batches of 8 by fused (n=5)." in said
    assert "gain over tuned_single is 2.50 (2.50–2.50)" in said and "does not pay" not in said
    assert cells(run.summary_table(result)) == [
        ["lenet", size, "100", "200", "fused K=3", "500", "5.00 (5.00–5.00)", "2.50 (2.50–2.50)", "5"]
        for size in ("8", "2")
    ]


def test_families_have_a_row_for_every_size_of_a_pack(tmp_path: Path) -> None:
    result = measured(tmp_path, "families", "--models", "mlp", "lenet", "gru", "--num-models", "2", "8")
    assert [row[:5] for row in cells(run.summary_table(result))] == [
        [model, "16", "100", "200", f"fused K={number}"] for model in ("mlp", "lenet", "gru") for number in (2, 8)
    ]
    figure = plot.draw(result)
    assert sorted(axes.get_title() for axes in figure.axes) == sorted(["mlp", "lenet", "gru"] * 2)
    assert {tuple(one.lines[0].get_ydata()) for axes in figure.axes for one in axes.containers} == {
        (3.0, 3.0), (5.0, 5.0), (4.0, 4.0), (1.5, 1.5), (2.5, 2.5), (2.0, 2.0),
    }  # fmt: skip


def test_packs_that_lose_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for side, rate in {"fused": 150.0, "threads": 100.0, "fused_threads": 120.0}.items():
        monkeypatch.setitem(RATES, side, rate)
    result = measured(tmp_path, "limits", "--quick")
    assert run.headline(result).endswith(
        "Packing does not pay over one tuned model at a time for 2 five_layers with batches of 4."
    )
