"""Kinds of searches from the command line: samplers, methods, metrics and what a space may hold, by what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from crossbow_py import load_models
from crossbow_py.search.__main__ import main
from crossbow_py.train.__main__ import main as train
from tests.searches import (
    DIGITS,
    report,
    search_digits,
    trained_by_command,
    values,
)

MLP = ["data=digits", "model=mlp", "model.hidden=[16]", "optimizer.learning_rate=0.05", "optimizer.weight_decay=1e-4"]
IMAGES = ["data=synthetic", "data.num_train=96", "data.num_test=32", "data.validation_fraction=0.25", "batch_size=24"]
GRID = ["sampler=grid", "method=none", "max_epochs=1", "output_dir=search", "device=cpu", "precision=fp32"]
pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "no_pictures")
ALONE = ["executor=serial", "packing=none"]


def trials() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report()["trials"]
    return found


def values_by(key: str) -> dict[Any, float]:
    """Last values by a parameter."""
    return {trial["params"][key]: trial["value"] for trial in trials()}


@pytest.mark.slow
def test_grid_tries_every_combination_once() -> None:
    rates = "space.optimizer.learning_rate={low:0.01,high:1.0,log:true,num:3}"
    assert main([*MLP, *GRID, *ALONE, rates, "space.label_smoothing=[0.0,0.1]"]) == 0
    tried = [tuple(trial["params"].values()) for trial in trials()]
    expected = [(rate, share) for rate in (0.01, 0.1, 1.0) for share in (0.0, 0.1)]
    assert sorted(tried) == [pytest.approx(pair) for pair in expected]
    assert all(trial["state"] == "complete" for trial in trials())


@pytest.mark.slow
def test_parameter_with_a_condition_exists_only_where_that_holds() -> None:
    space = "space={optimizer:[sgd,adamw],optimizer.momentum:{choices:[0.5,0.9],when:{optimizer:sgd}}}"
    assert main([*MLP, *GRID, *ALONE, space]) == 0
    tried = [trial["params"] for trial in trials()]
    assert sorted(tried, key=str) == sorted(
        [{"optimizer": "adamw"}, *({"optimizer": "sgd", "optimizer.momentum": m} for m in (0.5, 0.9))], key=str
    )
    assert trained_by_command()["validation_accuracy"] == pytest.approx(report()["best"]["value"], abs=1e-6)


@pytest.mark.slow
def test_command_trains_the_best_trial_of_a_model_with_batch_norm() -> None:
    resnet = "model.args={depth: 8, in_channels: 1, num_classes: 10}"
    words = [word for word in DIGITS if not word.startswith("model.")]
    words += ["model=custom", "model.target=crossbow_py.models.resnet.ResNet", resnet, "metric=loss", "method=none"]
    assert main([*words, "num_trials=2", "max_epochs=1"]) == 0
    assert report()["best"]["value"] == pytest.approx(trained_by_command()["validation_loss"], rel=1e-3)


@pytest.mark.slow
def test_metric_loss_keeps_the_trials_with_the_least() -> None:
    assert search_digits("metric=loss", "num_trials=3") == 0
    first = {trial: own["1"] for trial, own in values().items()}
    assert [trial for trial, own in values().items() if "3" in own] == [min(first, key=lambda trial: first[trial])]
    best = report()["best"]
    assert best["value"] == pytest.approx(trained_by_command()["validation_loss"], rel=1e-4)
    assert report()["info"]["metric"] == "validation_loss"


F1 = ["metrics.f1.target=tests.state_metrics.MacroF1", "metrics.f1.num_classes=10"]


@pytest.mark.slow
@pytest.mark.usefixtures("packs_of_three")
@pytest.mark.parametrize("maximize", [True, False])
def test_metric_of_ones_own_decides_which_trials_go_on(maximize: bool) -> None:
    assert search_digits(*F1, "metric=f1", f"maximize={str(maximize).lower()}", "num_trials=3") == 0
    first = {trial: own["1"] for trial, own in values().items()}
    best = (max if maximize else min)(first, key=lambda trial: first[trial])
    assert [trial for trial, own in values().items() if "3" in own] == [best]
    assert report()["info"]["metric"] == "validation_f1" and report()["info"]["maximize"] is maximize
    found = trained_by_command()
    assert found["metrics"]["f1"] == pytest.approx(report()["best"]["value"], abs=1e-6)
    assert found["metrics"]["f1"] != found["validation_accuracy"]


@pytest.mark.slow
@pytest.mark.usefixtures("packs_of_three")
def test_dropout_in_the_space_is_each_trials_own() -> None:
    options = [*IMAGES, "data.shape=[1,28,28]", "model=lenet", "optimizer.learning_rate=0.01", "metric=loss"]
    rates = "space.model.dropout=[0.1,0.5,0.9]"
    assert main([*GRID, *options, rates, "space.seed=[5]"]) == 0
    packed = values_by("model.dropout")
    assert len(set(packed.values())) == 3
    assert trained_by_command()["validation_loss"] == pytest.approx(report()["best"]["value"], rel=1e-4)
    assert main([*GRID, *ALONE, *options, rates, "space.seed=[5]", "output_dir=alone"]) == 0
    alone = {trial["params"]["model.dropout"]: trial["value"] for trial in report("alone")["trials"]}
    assert packed == {rate: pytest.approx(value, rel=1e-3) for rate, value in alone.items()}


@pytest.mark.slow
def test_adapters_of_other_ranks_and_scales_share_packs_over_the_base_of_a_file() -> None:
    """Else each scale is a pack of its own, and what is adapted is drawn by each trial's seed."""
    words = [*MLP, "data.validation_fraction=0.2", "device=cpu", "precision=fp32", "executor=fused"]
    assert train([*words, "num_learners=1", "executor=serial", "max_epochs=2", "output_dir=base"]) == 0
    lora = ["init_from=base/model.safetensors", "model.lora={targets: ['1', '3']}", "optimizer=adamw"]
    space = ["space.model.lora.rank=[1, 4]", "space.model.lora.alpha={low: 4.0, high: 32.0}"]
    search = ["metric=loss", "method=none", "num_trials=4", "max_epochs=1", "max_pack_size=4", "output_dir=search"]
    assert main([*words, *lora, *space, *search]) == 0
    said = "\n".join(report()["notes"])
    assert said.count("Trials of mlp(lora.rank=4) ") == 1 and said.count("padded with zeros") == 1
    assert len({trial["params"]["model.lora.rank"] for trial in trials()}) == 2
    base = load_file("base/model.safetensors")
    best = load_models("search")[0].state_dict()
    assert all(torch.equal(best[f"base_model.model.{n}.base_layer.weight"], base[f"{n}.weight"]) for n in (1, 3))
    assert trained_by_command()["validation_loss"] == pytest.approx(report()["best"]["value"], rel=1e-4)
