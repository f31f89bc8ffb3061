"""ModelBatch's figures: which sides there are, tables and pictures of made-up results, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.packs import comparison
from experiments.model_batch import plot, run
from experiments.model_batch.run import FIGURES, sides_of
from tests.unit.experiments.packs import PretendedProcess


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PretendedProcess]:
    """Nothing is trained, and no images are read."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(comparison, "SideProcess", PretendedProcess)
    monkeypatch.setattr(PretendedProcess, "visits", [])
    return PretendedProcess


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert run.main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize(("figure", "device", "expected"), [
    ("training", "cpu", ["default_loop 1", "tuned_single 1", "serial 1", "threads 16", "fused 16", "fused_threads 16"]),
    ("training", "cuda", ["default_loop 1", "tuned_single 1", "captured 1", "streams 16", "fused 16"]),
    ("inference", "cpu", [
        "default_loop 1", "tuned_single 1", "default_ensemble 16", "threads 16", "fused 16", "fused_threads 16",
    ]),
    ("inference", "cuda", ["default_loop 1", "tuned_single 1", "default_ensemble 16", "fused 16"]),
    ("layers", "cpu", ["default_loop 64", "tuned_single 64", "fused 64"]),
])  # fmt: skip
def test_sides_of_a_figure_are_one_model_at_a_time_and_packs(figure: str, device: str, expected: list[str]) -> None:
    sides = sides_of(FIGURES[figure], device)
    assert [f"{side.side} {side.num_learners}" for side in sides] == expected
    assert {side.work for side in sides} == {FIGURES[figure].work}


@pytest.mark.usefixtures("pretended")
def test_result_has_a_panel_a_batch_size_and_a_headline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(tmp_path, "mlp_training", "--batch-sizes", "8", "2", "8", "--num-models", "3", "--model", "lenet")
    assert [(row["batch_size"], row["side"]) for row in result["rows"][::6]] == [
        (8, "default_loop"),
        (2, "default_loop"),
    ]
    assert {row["num_models"] for row in result["rows"]} == {1, 3}
    assert {row["model"] for row in result["rows"]} == {result["figure"]["model"]} == {"lenet"}
    assert (result["figure"]["num_models"], result["figure"]["batch_sizes"]) == (3, [8, 2])
    said = capsys.readouterr().out
    assert "The largest gain over default_loop is 5.00 (5.00–5.00), with batches of 8 by fused (n=5)." in said
    assert "gain over tuned_single is 2.50 (2.50–2.50)" in said
    summary = run.summary_table(result).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary] == [
        [size, "100", "200", "fused K=3", "500", "5.00 (5.00–5.00)", "2.50 (2.50–2.50)", "5"] for size in ("8", "2")
    ]


@pytest.mark.usefixtures("pretended")
def test_picture_shows_rates_of_all_sides_and_ratios_to_those_of_one_model(tmp_path: Path) -> None:
    result = measured(tmp_path, "inference", "--batch-sizes", "1", "4")
    summary = run.summary_table(result).splitlines()[-1]
    assert [cell.strip() for cell in summary.split("|")[1:6]] == ["4", "100", "200", "125", "fused K=16"]
    assert summary.split("|")[9].strip() == "4.00 (4.00–4.00)"  # over 125 images/s
    rates, *over = plot.draw(result).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in rates.lines}
    pretended = {"default_loop": 100, "tuned_single": 200, "default_ensemble": 125, "threads": 300, "fused": 500,
                 "fused_threads": 400}  # fmt: skip
    assert lines == {side: [rate] * 2 for side, rate in pretended.items()}
    for axes, base in zip(over, ("default_loop", "tuned_single", "default_ensemble"), strict=True):
        drawn = {one.get_label(): list(one.lines[0].get_ydata()) for one in axes.containers}
        assert drawn == {side: [rate / pretended[base]] * 2 for side, rate in pretended.items() if side != base}


def test_result_without_packs_is_told_without_gains(
    pretended: type[PretendedProcess], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(pretended, "absent", ("threads", "fused", "fused_threads"))
    result = measured(tmp_path, "inference", "--quick")
    assert run.headline(result) == "figure 4: inference by five-layer networks: 2 models (five_layers)."
    assert "Left out: side fused K=2 fp32 inference: not here" in run.result_text(result)
    assert (result["method"]["repetitions"], result["rows"][0]["batch_size"]) == (1, 4)
