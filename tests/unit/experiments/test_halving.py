"""Successive halving by several programs: what is made of their lines, and the table, by hand."""

from __future__ import annotations

import torch

from experiments.halving import run

LINES = [
    {"at": 101.0, "epochs": 1, "value": 0.5, "test": None},
    {"at": 102.0, "epochs": 1, "value": 0.9, "test": None},
    {"at": 104.0, "epochs": 4, "value": 0.8, "test": 0.7},
]


def ended(side, repetition, seconds, value, values):
    return {"side": side, "repetition": repetition, "seconds": seconds, "samples": 100, "value": value,
            "test_accuracy": value - 0.1, "values": values}  # fmt: skip


def test_trials_that_begin_anew_train_on_more_samples():
    job = {"rungs": (1, 4), "train": (torch.zeros(10, 784), torch.zeros(10))}
    found = run.outcome(LINES, job, 100.0, continues=True)
    assert (found["samples"], found["value"], found["test_accuracy"]) == (10 * (1 + 1 + 3), 0.8, 0.7)
    assert found["values"] == [(1.0, 0.5), (2.0, 0.9), (4.0, 0.8)]
    assert run.outcome(LINES, job, 100.0, continues=False)["samples"] == 10 * (1 + 1 + 4)


def test_sides_are_compared_within_repetitions_and_a_missing_one_says_so():
    runs = [
        ended("crossbow_py", 0, 2.0, 0.9, [(1.0, 0.8), (1.5, 0.9)]), ended("optuna", 0, 6.0, 0.8, [(5.0, 0.8)]),
        ended("optuna", 1, 9.0, 0.8, [(7.0, 0.8)]), ended("crossbow_py", 1, 2.0, 0.7, [(2.0, 0.7)]),
        {"side": "ray", "repetition": 0, "missing": "no ray"},
    ]  # fmt: skip
    table, note = run.result_text({"runs": runs, "configurations": 4, "versions": {}}).split("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]]
    # 4 models in 2 and in 7.5 s; 6/2 and 9/2; 0.8 is reached after 1 and 5 s, 0.7 after 2 and 7 s.
    assert rows[0] == ["2.0 (2.0–2.0)", "120", "50", "1.00", "1.5", "0.8000", "0.7000", "2"]
    assert rows[1] == ["7.5 (6.0–9.0)", "32", "14", "3.75", "6.0", "0.8000", "0.7000", "2"]
    assert rows[2] == rows[3] == ["–"] * 8
    assert note == "Ray Tune is missing: no ray"


def test_every_side_gets_what_our_search_samples():
    x, y = torch.zeros(32, 784), torch.arange(32) % 2
    job = {**run._FIXED, **dict.fromkeys(("train", "validation", "test"), (x, y)), "rungs": (1, 4), "number": 4}
    one, again, other = (run.configurations(job | {"seed": seed}) for seed in (0, 0, 1))
    assert one == again and one != other
    assert len(one) == 4 and all(own.keys() == run.SPACE.keys() for own in one)
