"""The runs on photographs: what is trained by default, and tiny images trained, recorded and tabulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.flowers import run
from experiments.tables.recorded_report import table_of
from tests.unit.experiments.samples import cells


def test_run_on_photographs_is_recorded_with_its_wait_for_data_also_when_given_again(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line = ["--seeds", "0", "--runs", str(tmp_path), "--results", str(tmp_path / "out"),
                    f"data.folder={photos}", "data.size=16", "data.resize=20", "data.cache=false", "num_workers=1",
                    "model=mlp", "model.hidden=[8]", "batch_size=2", "max_epochs=1", "executor=serial",
                    "device=cpu"]  # fmt: skip
    assert run.main(command_line) == 0
    first = json.loads((tmp_path / "out" / "flowers.json").read_text())
    assert run.main(command_line) == 0
    capsys.readouterr()
    result = json.loads((tmp_path / "out" / "flowers.json").read_text())
    (recorded,) = result["runs"]
    assert recorded["summary"]["num_workers"] == 1
    assert 0 < recorded["summary"]["data_wait_share"] <= 1
    assert recorded["summary"]["data_wait_share"] == first["runs"][0]["summary"]["data_wait_share"]
    assert str(tmp_path) not in json.dumps(result["runs"])
    table = table_of(run.RUNS)(result)
    assert cells(table, 0)[-6:-4] == ["epochs to 0.45", "minutes to 0.45"]
    assert cells(table, -1)[:3] == ["0", "2", "2"]
    assert cells(table, -1)[-2:] == ["1", f"{recorded['summary']['data_wait_share']:.1%}"]


def test_runs_on_photographs_are_three_seeds_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []
    monkeypatch.setattr("experiments.grids.recorded_runs.train", lambda keys: trained.append(keys) or 0)
    monkeypatch.setattr("experiments.grids.recorded_runs.collect", lambda folder: folder.name)
    assert run.main(["--runs", str(tmp_path), "--results", str(tmp_path), "max_epochs=1"]) == 0
    assert [keys[:2] for keys in trained] == [["+experiment=flowers", f"seed={seed}"] for seed in (0, 1, 2)]
    assert trained[0][-1] == "max_epochs=1"
    assert json.loads((tmp_path / "flowers.json").read_text())["runs"] == ["seed-0", "seed-1", "seed-2"]
