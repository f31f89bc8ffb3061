"""The comparison of many small models with other software: its table, and what is said of software that is missing."""

from __future__ import annotations

import pytest

from experiments.bench import environments
from experiments.many_models import run


def job(side, seconds, *, first=False, threads="", **others):
    return {"task": "series", "side": side, "threads": threads, "first": first, "seconds": seconds, "models": 16,
            "test_loss": 0.5, **others}  # fmt: skip


RUNS = [
    job("many", 8.0, first=True), job("many", 4.0), job("many", 6.0), job("many", 4.0),
    job(run.PLAIN, 24.0, threads="1"), job(run.PLAIN, 20.0, threads="2"), job(run.CORES, 12.0),
    {"task": "series", "side": run.FUNC, "threads": "", "first": False, "missing": "RuntimeError: no batching rule"},
    job(run.JAX, 10.0, compiling=6.0, versions={"jax": "0.10.2"}),
]  # fmt: skip


def test_table_has_models_a_minute_and_ratios_to_the_best_of_each_kind():
    table, notes = run.opponents_text({"runs": RUNS}).split("\n\n")
    cells = [own.strip() for own in table.splitlines()[-1].split("|")[2:-1]]
    # 16 models in 8, 4, 20, 12, –, 10 and 4 s; 12 s of processes and 10 s of JAX over 4 s.
    assert cells == ["120", "240", "48", "80", "–", "96", "240", "3.00", "2.50", "0.500 · 0.500 · 0.500 · 0.500", "3"]
    assert notes.splitlines() == ["- torch.func: RuntimeError: no batching rule", "- JAX: jax 0.10.2"]


def test_first_page_has_the_best_of_one_model_at_a_time_and_of_packs_by_others():
    (row,) = run.models_a_minute({"opponents": {"kind": run.OPPONENTS, "runs": RUNS}, "cpu": {"runs": []}})
    assert row[1:] == ["240", f"80 ({run.CORES})", f"96 ({run.JAX})", "3"]


def test_rows_stand_where_all_other_software_is_missing():
    runs = [own for own in RUNS if own["side"] != run.JAX]
    runs.append({"task": "series", "side": run.JAX, "threads": "", "first": False, "missing": "no jax"})
    table = run.opponents_text({"runs": runs}).split("\n\n")[0]
    assert [own.strip() for own in table.splitlines()[-1].split("|")[6:11]] == ["–", "–", "–", "3.00", "–"]


def test_rates_against_the_number_of_models_are_medians_and_those_of_the_better_number_of_threads():
    def told(side, models, rate, threads=""):
        return {"task": "series", "side": side, "threads": threads, "count": models, "first": False, "samples": 600,
                "images_per_s": rate}  # fmt: skip

    gone = {"task": "series", "side": run.FUNC, "threads": "", "count": 1, "first": False, "missing": "no rule"}
    runs = [told(run.PLAIN, 0, 100, "1"), told(run.PLAIN, 0, 90, "2"), told(run.CORES, 0, 150), gone,
            told("many", 1, 80), told("many", 4, 300), told("many", 1, 60), told("many", 1, 70)]  # fmt: skip
    table, notes = run.counts_text({"runs": runs}).split("\n\n")
    cells = {(row := [own.strip() for own in line.split("|")[2:-1]])[0]: row[1:] for line in table.splitlines()[2:]}
    # Models of 600 samples: 100 samples/s are 10 models a minute.
    assert cells == {
        run.PLAIN: ["10", "10", "1"], run.CORES: ["15", "15", "1"], run.FUNC: ["–", "–", "0"], run.JAX: ["–", "–", "0"],
        "crossbow_py": ["7", "30", "3"],
    }  # fmt: skip
    assert notes == "- torch.func, GRUs of 32 units: no rule"


def test_environment_that_was_not_made_says_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    with pytest.raises(environments.MissingError, match=r"jax and flax.*environments.py jax"):
        environments.python_of("jax")


def test_package_that_cannot_be_installed_is_named_and_others_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "PACKAGES", {"gone": ("no-such-package",), "there": ("pip",)})

    def ran(words):
        if "no-such-package" in words and "install" in words:
            raise environments.MissingError("No matching distribution found")
        (tmp_path / "there").mkdir(exist_ok=True)
        return '{"pip": "26"}'

    monkeypatch.setattr(environments, "_run", ran)
    assert environments.main([]) == 1
    out, error = capsys.readouterr()
    assert error == "error: gone: No matching distribution found\n" and out == "there: pip 26\n"
    assert environments.versions("there") == {"pip": "26"}
