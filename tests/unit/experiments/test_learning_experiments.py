"""The experiments on learning: grids that are no longer valid, their tables and pictures, and the default loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.train.config import TrainConfig
from experiments.averaging_rules import report as averaging_rules
from experiments.batch_norm import plot as batch_norm_plot
from experiments.batch_norm import report as batch_norm
from experiments.batch_norm.variants import VARIANTS
from experiments.batch_size import plot as batch_plot
from experiments.batch_size import report as batch_size
from experiments.batch_size.report import LEARNERS, ONE
from experiments.bench.results import EXPERIMENTS
from experiments.gradient_noise import report as gradient_noise
from experiments.grids.grid import FILE, Cell, Grid, read_grids
from experiments.grids.running import recorded
from experiments.time_to_accuracy import default_loop
from experiments.time_to_accuracy import report as time_to_accuracy
from experiments.time_to_accuracy.report import BY_MUON, BY_SGD, DEFAULT
from tests.unit.experiments.pretended_run import epochs_of
from tests.unit.experiments.samples import cells as table_cells
from tests.unit.experiments.test_cells import MACHINE, made_up

GRIDS: dict[str, Grid] = {
    f"{file.parent.name}/{name}": grid
    for file in sorted(EXPERIMENTS.glob(f"*/{FILE}"))
    for name, grid in read_grids(file.parent.name).items()
}


# Composing a configuration takes a tenth of a second, so of most grids only a few cells are, but in a long test.
QUICK = "time_to_accuracy/lenet"
LONG = [pytest.mark.slow, pytest.mark.long]
COUNTS = {"some": (1, [pytest.mark.slow]), "all": (None, LONG)}


@pytest.mark.parametrize(("name", "count"), [
    (QUICK, None),
    *(pytest.param(name, count, marks=marks, id=f"{name} {which}")
      for which, (count, marks) in COUNTS.items() for name in GRIDS if name != QUICK),
])  # fmt: skip
def test_every_cell_of_a_grid_is_a_valid_configuration_of_its_own(name: str, count: int | None) -> None:
    grid = GRIDS[name]
    step = -(-len(grid.cells) // (count or len(grid.cells)))
    cells = grid.cells[::step]
    configs = [compose([*cell.overrides, "seed=0"], TrainConfig) for cell in cells]
    assert all(config.max_epochs is not None and config.output_dir is None for config in configs)
    assert len({cell.name for cell in grid.cells}) == len(grid.cells)
    assert len({cell.key for cell in cells}) == len(cells)
    assert grid.reference is None or grid.reference in {cell.name for cell in grid.cells}


def test_small_residual_network_is_one_of_eight_layers() -> None:
    config = compose(GRIDS["averaging_rules/resnet8"].cells[0].overrides, TrainConfig)
    model = config.model.build((3, 32, 32), 10)
    assert sum(parameter.ndim > 1 for parameter in model.parameters()) == 8


def labelled(name: str, seed: int, accuracy: float | None, elapsed_s: float = 3.0, **labels: Any) -> dict[str, Any]:
    """A run whose second epoch ends after so many seconds."""
    run = made_up(name, seed, accuracy)
    run["epochs"][1]["elapsed_s"] = elapsed_s
    return {**run, "labels": labels}


def result_of(runs: list[dict[str, Any]], targets: list[float]) -> dict[str, Any]:
    return {"machine": MACHINE, "grid": "lenet", "title": "LeNet", "targets": targets, "reference": None,
            "num_cells": 3, "settings": "", "runs": runs}  # fmt: skip


def batches() -> dict[str, Any]:
    """At 32 the second rate is the best; at 64 one rate gets there with one seed of two, the learners with both."""


    def at(name: str, seed: int, accuracy: float | None, side: str, total: int, rate: float) -> dict[str, Any]:
        run = labelled(name, seed, accuracy, side=side)
        run["summary"] |= {"num_learners": 1, "batch_size": total}
        return {**run, "settings": f"optimizer.learning_rate={rate}"}

    runs = [at(f"{rate}", seed, 0.99, ONE, 32, rate) for rate in (0.1, 0.2) for seed in (0, 1)]
    for run in runs[2:]:
        run["epochs"] = epochs_of(1.98)[:1]
    runs += [at("64", seed, own, ONE, 64, 0.4) for seed, own in ((0, 0.99), (1, None))]
    runs += [at("2 · 32", seed, 0.99, LEARNERS, 64, 0.2) for seed in (0, 1)]
    return result_of(runs, [0.98])


def test_batches_that_never_reach_the_target_are_shown_as_that() -> None:
    result = batches()
    result["targets"] = [0.999]
    assert table_cells(batch_size.batches_table(result), 2)[:5] == ["32", "–", "–", "–", "2"]
    assert batch_plot.draw(result).axes


def learning(run: dict[str, Any], noise: list[tuple[float, float]], spread: float | None = None) -> dict[str, Any]:
    """A run whose evaluations have measured so much of tr(Σ) and |G|²."""
    for record, (variance, squared_norm) in zip(run["epochs"], noise, strict=True):
        measured = {"gradient_variance": variance, "squared_gradient_norm": squared_norm, "agreement": None,
                    "sharpness": 20.0}  # fmt: skip
        record.update(spread=spread, learning=measured)
    return run


def noise() -> dict[str, Any]:
    """With one learner noise hides the gradient at the end of the second seed, and with four at the end of both."""
    runs = [learning(made_up("one", 0, 0.9), [(8.0, 2.0), (9.0, 3.0)]),
            learning(made_up("one", 1, 0.9), [(8.0, 0.0), (9.0, -1.0)]),
            learning(made_up("sma", 0, 0.9), [(8.0, 2.0), (9.0, -1.0)], spread=0.25)]  # fmt: skip
    return result_of(runs, [])


def test_gradient_noise_scale_is_of_means_over_seeds_and_none_where_noise_hides_the_gradient() -> None:
    assert gradient_noise.noise_scale_samples([]) is None
    table = gradient_noise.statistics_table(noise())
    assert table_cells(table, 2)[:8] == ["one", "4", "8", "–", "9", "–", "–", "20"]
    assert table_cells(table, 3)[:8] == ["sma", "4", "4", "–", "–", "–", "–", "20"]


def test_rules_are_compared_over_data_sets_in_points_and_those_that_broke_are_counted() -> None:
    accuracies = {"one learner": (0.9, 0.92), "sma, linear": (0.91, 0.92), "papa, linear": (0.1, 0.91),
                  "elastic, linear": (None, None)}  # fmt: skip
    runs = [made_up(name, seed, own) for name, each in accuracies.items() for seed, own in enumerate(each)]
    four = [{**run, "cell": run["cell"].replace("linear", "linear, K=4")} for run in runs if run["seed"] == 0]
    table = averaging_rules.differences_table({"digits": result_of(runs, []), "resnet32": result_of(four[:2], [])})
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "sma, linear", "elastic, linear", "papa, linear",
    ]  # fmt: skip
    assert table_cells(table, 2) == ["sma, linear", "+0.50 ± 6.35", "+1.00"]
    assert table_cells(table, 3) == ["elastic, linear", "2 of 2 broke", "–"]
    assert table_cells(table, 4) == ["papa, linear", "1 of 2 broke", "–"]


def sides() -> dict[str, Any]:
    """Learners take 2 and 4 seconds, the faster single model 3 and 4, the default loop 10 and does not get there."""
    seconds = {("learners, K=2", "learners"): (2.0, 4.0), ("one model, Muon, b=32", BY_MUON): (6.0, 6.0),
               ("one model, SGD, b=64", BY_SGD): (3.0, 4.0), ("default", DEFAULT): (10.0, None)}  # fmt: skip
    return result_of(
        [
            labelled(name, seed, 0.5 if own is None else 0.99, own or 9.0, side=side)
            for (name, side), pair in seconds.items()
            for seed, own in enumerate(pair)
        ],
        [0.98, 0.999],
    )


def test_target_that_nobody_reached_has_no_times() -> None:
    table = time_to_accuracy.sides_table(sides(), 0.999)
    assert table_cells(table, 2)[6:10] == ["–"] * 4
    assert time_to_accuracy.result_text(sides()).count("| learners, K=2") == 2


def measured(name: str, seed: int, mean: float, gains: tuple[float, ...], alone: bool = True) -> dict[str, Any]:
    """A run whose accuracy is nothing at first, and then `mean`; with other statistics it is more by `gains`."""
    lines = [
        {
            "epoch": epoch,
            "samples_seen": 100 * epoch,
            "variants": {
                variant: {
                    "test_accuracy": epoch * (mean + gain),
                    "test_loss": 1.0,
                    "statistics_s": place * (1.0 if alone else 0.5),
                    "evaluation_s": 2.0,
                }
                for place, (variant, gain) in enumerate(zip(VARIANTS, (0, *gains), strict=True))
            },
        }
        for epoch in (0, 1)
    ]
    return {**made_up(name, seed, mean, alone), "measured": lines}


def statistics() -> dict[str, Any]:
    """Two seeds of a cell, of which the first was alone, and one of another that diverged."""
    runs = [measured("sma", 0, 0.8, (0.01, 0.02, 0.03)), measured("sma", 1, 0.7, (0.03, 0.02, 0.01), alone=False)]
    return result_of([*runs, made_up("wild", 0, None)], [])


def test_seconds_of_statistics_are_of_runs_that_were_alone() -> None:
    costs = statistics()
    assert table_cells(batch_norm.costs_table(costs), 4)[1:] == ["2.000", "0.750"]  # of 2 and of 1 in 2 seconds
    costs["runs"] = costs["runs"][1:]
    assert table_cells(batch_norm.costs_table(costs), 4)[1:] == ["–", "0.500"]


def test_statistics_of_which_all_runs_diverged_have_no_tables() -> None:
    result = statistics()
    result["runs"] = result["runs"][2:]
    assert batch_norm.result_text(result).startswith("All runs diverged.")
    assert batch_norm_plot.draw(result).axes


def test_default_loop_learns_the_digits_and_writes_the_records_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_loop, "_WORKERS", 0)
    words = ["+experiment=digits", "model.hidden=[16]", "num_learners=1", "max_epochs=3", "device=cpu",
             "data.crop_padding=1", f"output_dir='{tmp_path}'", "resume=auto"]  # fmt: skip
    assert default_loop.main(["2", *words]) == 0
    found = recorded(Cell("x", tuple(words)), 0, tmp_path)
    assert found is not None
    assert [record["epoch"] for record in found["epochs"]] == pytest.approx([0.5, 1, 1.5, 2, 2.5, 3], abs=0.02)
    seconds = [record["elapsed_s"] for record in found["epochs"]]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert found["summary"]["test_accuracy"] > 0.8
    assert default_loop.main(["1", *words, "max_epochs=5", "target_accuracy=0.5"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"] < 5


@pytest.mark.parametrize("word", ["optimizer=muon", "data.flip=alternating", "num_learners=2"])
def test_default_loop_refuses_what_it_would_not_follow(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the default loop has one learner, or a batch"):
        default_loop.main(["1", "+experiment=digits", "num_learners=1", f"output_dir='{tmp_path}'", word])


def test_batches_of_the_default_loop_grow_with_what_was_drawn_and_hold_each_sample_once() -> None:
    batches = default_loop.Batches(20, lambda drawn: 2 if drawn < 5 else 4)
    found = list(batches)
    assert [len(batch) for batch in found] == [2, 2, 2, 4, 4, 4, 2]
    assert sorted(sample for batch in found for sample in batch) == list(range(20))
    assert [len(batch) for batch in batches] == [4] * 5


def test_default_loop_that_diverges_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_loop, "_WORKERS", 0)
    words = ["+experiment=digits", "model.hidden=[16]", "max_epochs=2", "device=cpu", "optimizer.learning_rate=1e30"]
    assert default_loop.main(["1", *words, "num_learners=1", f"output_dir='{tmp_path}'"]) == 0
    found = recorded(Cell("x", ()), 0, tmp_path)
    assert found is not None
    assert (found["status"], found["summary"]["test_accuracy"], len(found["epochs"])) == ("failed", None, 1)
