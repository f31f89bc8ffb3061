"""Every averaging rule as it comes learns the digits with four learners."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.averaging import RULES
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rule", [name for name, kind in RULES.items() if kind.has_central_model])
def test_rule_learns_the_digits_with_four_learners(rule: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = ["averaging.group_size=2"] if rule == "grouped_sma" else []  # in one group all of them average gradients
    options = ["num_learners=4", "executor=threads", "precision=fp32", f"output_dir={folder}"]
    assert main(["+experiment=digits", f"averaging={rule}", *own, *options]) == 0
    assert read_summary(folder)["test_accuracy"] >= 0.95
