"""A search's folder that an earlier version wrote: gone on with as if it were begun today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.search.__main__ import main

pytest.importorskip("optuna")
GOLDEN_SEARCH = Path(__file__).parent / "digits_search"
WORDS = [
    "data=digits", "model=mlp", "model.hidden=[4]", "device=cpu", "precision=fp32", "executor=serial", "packing=none",
    "space.batch_size=[16,32]", "space.optimizer.learning_rate={low: 0.05, high: 0.2}", "num_trials=3",
    "min_epochs=0.05", "max_epochs=0.15",
]  # fmt: skip


def test_search_with_all_keys_of_a_run_is_gone_on_with(tmp_path):
    folder = tmp_path / "search"
    shutil.copytree(GOLDEN_SEARCH, folder)
    assert {"trace", "num_learners", "averaging"} <= read_yaml(folder / "config.yaml").keys()
    assert main([*WORDS, f"output_dir={folder}"]) == 0
    summary = json.loads((folder / "search.json").read_text())
    assert summary["status"] == "finished"
    assert [trial["trial"] for trial in summary["trials"]] == [0, 1, 2]
    # measured by the version that began it
    assert summary["trials"][0]["params"]["optimizer.learning_rate"] == 0.07763935239193381
    assert "host:1" in (folder / "search.journal").read_text()
