"""Hyperband by several sides: ratios, table and picture of made-up runs, and a short measurement for real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.search.config import SearchConfig
from experiments.hyperband import measure, plot, run
from experiments.hyperband.measure import SIDES, measure_hyperband
from experiments.hyperband.others import OTHERS, missing

SECONDS = {"default_loop": (300.0, 270.0), "one_at_a_time": (150.0, 162.0), "packed": (100.0, 100.0)}


def made_up(seconds: dict[str, tuple[float, float]] = SECONDS) -> dict[str, Any]:
    """Two runs a side; of those of the default loop nobody knows what took the time."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for side, taken in seconds.items():
        common = {"test_accuracy": 0.98, "samples": 50_000, "values": [[0, 0, 0.9], [0, 1, 0.97], [1, 0, 0.8]]}
        common |= {"precision": "bf16"} if side == "packed" else {}
        split = {} if side == "default_loop" else {"evaluation_s": 10.0, "overhead_s": 5.0}
        runs[side] = [{"seconds": own, **common, **split, **({"train_s": own - 15} if split else {})} for own in taken]
    return {
        "overrides": ["+experiment=search_lenet"], "repetitions": 2, "packing": ["Packs of 9.", "Packs of 9."],
        "runs": runs,
        "seconds": {side: measure.spread([own["seconds"] for own in runs[side]]) for side in SIDES},
        "ratios": {
            f"{side}_over_packed": measure.spread(measure.paired_ratios(seconds[side], seconds["packed"]))
            for side in SIDES[:-1]
        },
        "best": dict.fromkeys(SIDES, 0.98),
    }  # fmt: skip


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Searches that take no time; the sides in the order they ran."""
    ran: list[str] = []

    def search(side: str, overrides: Sequence[str], num_processes: int) -> dict[str, Any]:
        ran.append(side)
        return dict(made_up()["runs"][side][(len(ran) - 1) // len(SIDES)])

    monkeypatch.setattr(measure, "_warm_up", lambda _: ["Packs of 9."])
    monkeypatch.setattr(measure, "_run_apart", search)
    return ran


def test_sides_take_turns_in_one_order_and_then_the_other(pretended: list[str]) -> None:
    found = measure_hyperband(["+experiment=search_lenet"], 2, "cuda")
    assert (found["overrides"], found["device"]) == (["+experiment=search_lenet", "device=cuda"], "cuda")
    assert pretended == [*SIDES, *reversed(SIDES)]
    # 300 / 100 and 270 / 100; 150 / 100 and 162 / 100
    expected = {"default_loop_over_packed": (2.85, 2.7, 3.0), "one_at_a_time_over_packed": (1.56, 1.5, 1.62)}
    for name, numbers in expected.items():
        assert tuple(found["ratios"][name].values()) == pytest.approx(numbers)
    assert found["seconds"]["default_loop"] == {"median": 285.0, "minimum": 270.0, "maximum": 300.0}


def test_goal_on_cuda_is_one_of_its_own_and_the_other_ratio_is_said_without() -> None:
    on_cuda = {**made_up(), "device": "cuda"}
    default, tuned, _ = run.headline(on_cuda).split(". ", 2)
    assert default.endswith("5.0 is the goal, and is missed")
    assert tuned == (
        "Packs in bf16 end the search 1.56 (1.50–1.62) times as fast as one tuned trial at a time in fp32 (n=2)"
    )
    rows = run.sides_table(on_cuda).splitlines()[2:]
    assert [row.split("|")[7].strip() for row in rows] == ["≥ 5.0", "", ""]
    # two trials in 285, 156 and 100 s
    assert [row.split("|")[5].strip() for row in rows] == ["0.01", "0.01", "0.02"]


def test_those_that_go_on_with_other_trials_are_compared_by_images_a_second() -> None:
    runs = {"packed": [(100, 1000.0), (200, 1000.0)], "optuna": [(200, 900.0), (200, 1200.0)]}
    result = {"runs": {side: [{"seconds": s, "samples": n} for s, n in each] for side, each in runs.items()}}
    # 10 / 4.5 and 5 / 6
    assert run.pace_ratio(result, "optuna") == {"median": 1.5278, "minimum": 0.8333, "maximum": 2.2222}


def test_optuna_and_ray_tune_are_sides_on_a_cpu_where_they_are_installed(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def search(side: str, overrides: Sequence[str], num_processes: int) -> dict[str, Any]:
        ran.append((side, num_processes))
        return {**made_up()["runs"]["default_loop"][0], "seconds": 100.0 if side == "packed" else 250.0}

    monkeypatch.setattr(measure, "_run_apart", search)
    monkeypatch.setattr(measure, "missing", {"ray_tune": "ray not installed"}.get)
    found = measure_hyperband(["+experiment=search_lenet"], 1, "cpu", 2)
    assert ran == [(side, 2) for side in ("optuna", *SIDES)]
    assert found["ratios"]["optuna_over_packed"]["median"] == 2.5
    assert run.sides_table(found).splitlines()[2].startswith("| Optuna, a trial a process")
    assert run.others_text(found) == (
        "Optuna and Ray Tune train 2 trials at a time. "
        "Ray Tune, fractions of the device: left out, ray not installed."
    )
    assert (run.names_of(made_up()).keys(), run.others_text(made_up())) == (dict.fromkeys(SIDES).keys(), "")


@pytest.mark.parametrize("found", [True, False])
def test_search_without_arguments_is_on_mnist_or_on_images_of_its_shape(
    found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    if found:
        monkeypatch.setattr(run.Mnist, "load", lambda *_, **__: None)
    config = compose(list(run.default_search()), SearchConfig)
    assert (config.data.NAME, config.precision, config.experiment) == (
        "mnist" if found else "synthetic", "auto", "search_lenet",
    )  # fmt: skip
    assert ("synthetic images instead of MNIST" in capsys.readouterr().out) == (not found)


def test_picture_splits_the_bars_of_the_sides_whose_parts_are_known() -> None:
    (axes,) = plot.draw({"lenet_mnist": made_up()}).axes
    bars = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x()): bar.get_width() for bar in axes.patches}
    # from below: packs, one tuned trial at a time, the default loop
    assert bars == {
        (0, 0.0): 85.0, (0, 85.0): 10.0, (0, 95.0): 5.0, (1, 0.0): 141.0, (1, 141.0): 10.0, (1, 151.0): 5.0,
        (2, 0.0): 285.0,
    }  # fmt: skip
    assert [label.get_text() for label in axes.get_legend().get_texts()] == [
        "training", "measuring", "rest", "all of it, not split",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_short_search_by_every_side_trains_the_same_trials_on_as_many_samples(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    search = ["+experiment=search_digits", "model.hidden=[8]", "num_trials=3", "max_epochs=3", "max_pack_size=2"]
    assert run.main(["--device", "cpu", "--repetitions", "1", "--processes", "0", "--json", str(path), *search]) == 0
    result = json.loads(path.read_text())
    # An epoch is 1351 samples, 85 batches of 16: three trials train one, and one of them goes on to 4053, 254 batches.
    for runs in result["runs"].values():
        assert [own["samples"] for own in runs] == [(3 * 85 + 254 - 85) * 16]
        assert sorted(rung for _, rung, _ in runs[0]["values"]) == [0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("side", OTHERS)
def test_optuna_and_ray_tune_train_the_trials_of_the_default_loop(side: str) -> None:
    if (reason := missing(side)) is not None:
        pytest.skip(reason)
    search = ["+experiment=search_digits", "model.hidden=[8]", "num_trials=3", "max_epochs=3", "device=cpu"]
    plain, found = (measure._run_apart(each, search, 2) for each in ("default_loop", side))
    # To the first rung all train alike; one thread or two round differently.
    first, others = ({trial: value for trial, rung, value in own["values"] if rung == 0} for own in (plain, found))
    assert len(first) == 3
    assert others == pytest.approx(first, abs=0.01)
    # As in the test above; whoever prunes when a trial reports, one trial at least goes on, and all of them may.
    ended = sum(rung for _, rung, _ in found["values"])
    assert ended >= 1
    assert found["samples"] == (3 * 85 + ended * (254 - 85)) * 16
    assert found["value"] == max(value for _, rung, value in found["values"] if rung == 1)
    assert 0.5 < found["test_accuracy"] <= 1
