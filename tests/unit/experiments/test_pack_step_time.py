"""Packs' step time: the panels of every part, tables and pictures of made-up results, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import workloads
from experiments.bench.packs import comparison
from experiments.bench.packs.side import DEFAULT, TUNED, prepare_packs
from experiments.pack_step_time import plot, run
from experiments.pack_step_time.run import LARGER_BATCHES, PARTS, Plan, models_of
from tests.unit.experiments.packs import RATES, PretendedProcess

SMALL = ["--families", "mlp", "lenet", "gru", "--num-models", "2", "8", "--device", "cpu"]


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is trained, and images are few and synthetic."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(workloads, "NUM_IMAGES", 64)
    monkeypatch.setattr(comparison, "SideProcess", PretendedProcess)
    monkeypatch.setattr(PretendedProcess, "visits", [])


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert run.main([*arguments, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("part", PARTS)
def test_panels_of_a_part_compare_packs_with_one_model_at_a_time_of_the_same_workload(
    part: str, tmp_path: Path
) -> None:
    plan = Plan(families=("mlp", "lenet", "gru"), num_models=(2, 8))
    found = prepare_packs(models_of(part, plan), "cpu", tmp_path)
    panels = PARTS[part](plan, found, "cpu")
    for panel in panels:
        alone = {(cell.workload.model, cell.workload.batch_size, cell.side.side) for cell in panel}
        for cell in panel:
            assert {(cell.workload.model, cell.workload.batch_size, base) for base in (DEFAULT, TUNED)} <= alone
    assert len(panels) == {"families": 3, "limits": 2 * len(LARGER_BATCHES) + 3 + 3}[part]


def test_families_have_a_row_for_every_size_of_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(tmp_path, "families", *SMALL)
    assert [row[:4] for row in cells(run.families_table(result["rows"]))] == [
        [model, "100", "200", f"fused K={count}"] for model in ("mlp", "lenet", "gru") for count in (2, 8)
    ]
    assert "over one tuned model at a time is 2.50 (2.50–2.50), of 2 mlp with batches of 16 by fused (n=5). Every" in (
        capsys.readouterr().out
    )
    figure = plot.draw(result)
    titles = [axes.get_title() for axes in figure.axes]
    assert sorted(titles) == sorted(["mlp", "lenet", "gru"] * 2)
    assert {tuple(one.lines[0].get_ydata()) for axes in figure.axes for one in axes.containers} == {
        (3.0, 3.0), (5.0, 5.0), (4.0, 4.0), (1.5, 1.5), (2.5, 2.5), (2.0, 2.0),
    }  # fmt: skip


@pytest.mark.parametrize("part", ["families", "limits"])
def test_packs_on_cuda_are_compared_with_one_captured_model_too(part: str, tmp_path: Path) -> None:
    plan = Plan(families=("mlp",), num_models=(2,))
    for panel in PARTS[part](plan, prepare_packs(models_of(part, plan), "cuda", tmp_path), "cuda"):
        sides = [cell.side.side for cell in panel]
        assert sides == ["default_loop", "tuned_single", "captured", "streams", "fused"]


def test_packs_that_lose_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RATES, "fused", 150.0)
    monkeypatch.setitem(RATES, "threads", 100.0)
    monkeypatch.setitem(RATES, "fused_threads", 120.0)
    result = measured(tmp_path, "families", "--quick", "--device", "cpu")
    assert run.headline(result).endswith(
        "Packing does not pay over one tuned model at a time for 2 mlp with batches of 4."
    )
