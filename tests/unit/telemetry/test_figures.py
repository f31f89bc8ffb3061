"""The table of figures, of runs that ended and of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossbow_py.telemetry.figures import RecordedRun, by_setting, figures, same_settings, seed_means

SUMMARY = {"test_accuracy": 0.98765, "time_to_accuracy_s": 12.34, "train_time_s": 725.0, "images_per_s": 12345.6,
           "model": "mlp", "num_learners": 4}  # fmt: skip
EPOCH = {"epoch": 2, "samples_seen": 2000, "test_accuracy": 0.5, "elapsed_s": 8.0, "images_per_s": 250.0,
         "num_learners": 2}  # fmt: skip


def recorded(status: str, **records: Any) -> RecordedRun:
    return RecordedRun(folder=Path("any"), status=status, **records)


def test_figures_of_a_run_that_ended_are_those_of_its_summary_and_of_another_those_of_its_newest_epoch() -> None:
    ended = recorded("target_reached", summary=SUMMARY, epochs=[EPOCH])
    killed = recorded("unfinished", config={"model": "lenet", "seed": 3}, epochs=[EPOCH])
    assert dict(figures([ended, killed])) == {
        "status": ["target reached", "unfinished"],
        "test accuracy": ["0.9877", "0.5000"],
        "time to accuracy": ["12.3 s", ""],
        "time of training": ["12:05", "8.0 s"],
        "images/s": ["12,346", "250"],
        "epochs": ["2", "2"],
        "samples seen": ["2,000", "2,000"],
        "model": ["mlp", "lenet"],
        "learners a device": ["4", "2"],
        "seed": ["", "3"],
    }
    assert same_settings([ended, killed]) == []


def test_language_models_have_tokens_in_place_of_images() -> None:
    ended = recorded("finished", summary={"images_per_s": 80.0, "tokens_per_s": 10240.0})
    assert dict(figures([ended]))["tokens/s"] == ["10,240"]
    assert "images/s" not in dict(figures([ended]))
    both = dict(figures([ended, recorded("finished", summary={"images_per_s": 80.0})]))
    assert (both["images/s"], both["tokens/s"]) == (["", "80"], ["10,240", ""])


def test_metrics_are_figures_but_for_those_of_many_values() -> None:
    each = {f"f1/{digit}": 0.5 for digit in range(5)}
    ended = recorded("finished", summary={"metrics": {"perplexity": 1234.567, "roc/a": 0.25, **each}})
    killed = recorded("unfinished", epochs=[{"metrics": {"perplexity": 2.0, "odd": "text"}}])
    damaged = recorded("unfinished", summary={"metrics": [3]})
    assert dict(figures([ended, killed, damaged])) == {
        "status": ["finished", "unfinished", "unfinished"],
        "perplexity": ["1,235", "2", ""],
        "roc/a": ["0.25", "", ""],
    }
    names = [name for name, _ in figures([recorded("finished", summary={**SUMMARY, "metrics": {"roc": 0.25}})])]
    assert names[:4] == ["status", "test accuracy", "roc", "time to accuracy"]


def test_settings_that_are_alike_stand_apart_from_the_table() -> None:
    runs = [recorded("finished", summary={"model": "mlp", "seed": seed, "precision": "fp32"}) for seed in range(2)]
    assert dict(figures(runs)) == {"status": ["finished"] * 2, "seed": ["0", "1"]}
    assert same_settings(runs) == [("model", "mlp"), ("precision", "fp32")]
    assert [name for name, _ in same_settings(runs[:1])] == ["model", "precision", "seed"]


def test_figures_of_a_damaged_summary_are_left_out() -> None:
    run = recorded("finished", summary={"test_accuracy": "high", "train_time_s": None})
    assert dict(figures([run])) == {"status": ["finished"]}


def of_seed(seed: int, accuracy: float, status: str = "finished", **config: Any) -> RecordedRun:
    return recorded(status, config={"seed": seed, "averaging": "sma", **config}, summary={"test_accuracy": accuracy})


def test_seeds_of_one_setting_are_a_mean_with_its_interval() -> None:
    runs = [of_seed(1, 0.90), of_seed(1, 0.80, averaging="papa", **{"averaging.rate": 3}), of_seed(2, 0.92)]
    groups = by_setting([*runs, of_seed(3, 0.1, "interrupted")])
    assert groups == {"averaging=sma": [runs[0], runs[2]], "averaging=papa": [runs[1]]}
    # 12.706, the quantile of Student's t for one degree of freedom, times 0.0141421 / √2.
    assert seed_means(groups) == [("seeds", ["2", "1"]), ("test accuracy", ["0.9100 ± 0.1271", "0.8000"])]


def test_runs_without_configuration_or_of_the_same_seed_are_no_seeds_of_a_setting() -> None:
    assert by_setting([recorded("finished", summary=SUMMARY)] * 2) == {}
    assert by_setting([of_seed(1, 0.9), of_seed(1, 0.9)]) == {}
