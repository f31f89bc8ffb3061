"""The comparison on tables: metrics by hand, and the rows of sides that ran and that are missing."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.tabular import run


def test_metrics_of_classes_and_of_values_are_those_by_hand():
    found = run.metrics(np.array([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5], [0.75, 0.25]]), np.array([0, 1, 1, 1]), 1.0)
    # Of three ones two are above the only zero, and one is level with it.
    assert found["auc"] == pytest.approx(2.5 / 3) and found["accuracy"] == 0.5
    assert found["log_loss"] == pytest.approx(-(2 * np.log(0.75) + np.log(0.5) + np.log(0.25)) / 4)
    assert run.metrics(np.array([1.0, 2.0]), np.array([1.0, 4.0]), 3.0) == {"rmse": pytest.approx(3 * 2**0.5)}


def test_row_of_a_missing_side_says_so_and_others_stand():
    def did(side, repetition, seconds, rmse):
        return {"table": "diamonds", "side": side, "repetition": repetition, "seconds": seconds, "peak_mib": 400.0,
                "metrics": {"rmse": rmse}}  # fmt: skip

    runs = [did(run.BASE, -1, 9.0, 0.1), did(run.BASE, 0, 4.0, 0.1), did("other", 0, 6.0, 0.125)]
    runs.append({"table": "diamonds", "side": "TabPack, 64", "repetition": 0, "missing": "no clone"})
    lines = run.result_text({"runs": runs, "versions": {"tabm": "1"}, "missing": ""}).splitlines()
    cells = {row[1].strip(): [own.strip() for own in row[2:-1]] for row in (line.split("|") for line in lines[4:7])}
    assert cells[run.BASE] == ["0.1000", "–", "4.0", "9.0", "1.00", "400", "1"]
    assert cells["other"] == ["0.1250", "0.025", "6.0", "–", "1.50", "400", "1"]
    assert cells["TabPack, 64"] == ["–"] * 6 + ["0"]
    assert lines[-2:] == ["- TabPack, 64 is missing: no clone", "- tabm 1"]
