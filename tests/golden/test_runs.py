"""A run's folder that an earlier version wrote: resumed, and loaded, as if it were written today."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import crossbow_py
from crossbow_py.train.__main__ import main

GOLDEN_RUN = Path(__file__).parent / "digits_run"
ROUNDS_IN_ALL = 70 + 80  # those of the earlier version, and those that its model was known after


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN_RUN, folder)
    return folder


@pytest.mark.slow
def test_run_of_an_earlier_version_trains_on_to_the_known_model(run):
    words = [f"config={run}", f"output_dir={run}", "resume=auto", f"max_rounds={ROUNDS_IN_ALL}"]
    assert main(words) == 0
    expected, found = load_file(run / "after_80_more_rounds.safetensors"), load_file(run / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


def test_model_of_an_earlier_version_is_loaded_for_prediction(run):
    (loaded,) = crossbow_py.load_models(run)
    expected = load_file(run / "model.safetensors")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name])
