"""A cell that is trained once and evaluated with every kind of BatchNorm statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.telemetry.records import read_metrics
from crossbow_py.train.__main__ import main as train
from experiments.batch_norm import variants
from experiments.batch_norm.variants import MEAN, VARIANTS
from experiments.grids.grid import Cell
from experiments.grids.running import recorded

RESNET8 = "model=custom model.target=crossbow_py.models.resnet.ResNet model.args={depth:8,in_channels:3,num_classes:10}"
# 6 rounds an epoch, which the running statistics of the learners lag behind.
WORDS = [
    "data=synthetic", "data.shape=[3,8,8]", "data.num_train=96", "data.num_test=40", *RESNET8.split(), "device=cpu",
    "executor=serial", "precision=fp32", "num_learners=2", "batch_size=8", "averaging=sma", "averaging.batch_norm=mean",
    "optimizer=sgd",
    "max_epochs=1", "resume=auto",
]  # fmt: skip


def run_of(folder: Path) -> dict[str, Any]:
    found = recorded(Cell("x", tuple(WORDS)), 0, folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in two parts."""
    made = tmp_path_factory.mktemp("variants")
    assert variants.main(["2", *WORDS, f"output_dir={made}"]) == 0
    return made


def test_every_part_is_evaluated_with_all_kinds_of_statistics(folder: Path) -> None:
    run = run_of(folder)
    assert [line["epoch"] for line in run["measured"]] == [0.5, 1.0]
    assert all(list(line["variants"]) == list(VARIANTS) for line in run["measured"])
    for line, record in zip(run["measured"], read_metrics(folder / "metrics.jsonl"), strict=True):
        mean = line["variants"][MEAN]
        assert (mean["test_accuracy"], mean["test_loss"]) == (record["test_accuracy"], record["test_loss"])
        assert len({each["test_loss"] for each in line["variants"].values()}) == len(VARIANTS)
        assert all(each["statistics_s"] > 0 and each["evaluation_s"] > 0 for each in line["variants"].values())


def test_recalibrated_statistics_are_those_of_a_run_that_asks_for_them(folder: Path, tmp_path: Path) -> None:
    asked = ["averaging.batch_norm=recalibrate", "averaging.recalibration_batches=8"]
    others = [word for word in WORDS if "batch_norm" not in word]
    assert train([*others, *asked, f"output_dir={tmp_path}"]) == 0
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    last = run_of(folder)["measured"][-1]["variants"]["recalibrate, 8 batches"]
    assert (last["test_accuracy"], last["test_loss"]) == (record["test_accuracy"], record["test_loss"])


def test_part_whose_measurement_was_cut_short_is_measured_again_and_not_trained(folder: Path) -> None:
    file = folder / "measured.jsonl"
    before, metrics = file.read_text().splitlines(), (folder / "metrics.jsonl").read_text()
    file.write_text(f"{before[0]}\n")
    assert variants.main(["2", *WORDS, f"output_dir={folder}"]) == 0
    again = json.loads(file.read_text().splitlines()[-1])["variants"]
    for name, measured in json.loads(before[1])["variants"].items():
        assert again[name]["test_loss"] == measured["test_loss"]
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_run_that_diverges_is_not_measured(tmp_path: Path) -> None:
    assert variants.main(["1", *WORDS, "optimizer.learning_rate=1e30", f"output_dir={tmp_path}"]) == 1
    run = run_of(tmp_path)
    assert run["status"] == "failed" and "measured" not in run
