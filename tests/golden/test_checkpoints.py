"""Checkpoints of every format so far are read, and training goes on from them to where it went then. See README.md."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from crossbow_py.core.errors import CheckpointError
from crossbow_py.distributed.ranks import ALONE
from crossbow_py.train.checkpoints.checkpoint import FORMAT_VERSION, checkpoints, find_newest
from tests.golden.make import AS_THEY_HAD_IT, GOLDEN, NUM_RANKS, ROUNDS_AFTER, ROUNDS_BEFORE, train_on, trainer
from tests.ranks import on_ranks

FORMATS = sorted(GOLDEN.glob("format_*"))


def test_every_format_so_far_has_its_golden_checkpoint():
    assert [folder.name for folder in FORMATS] == [f"format_{n}" for n in range(1, FORMAT_VERSION + 1)]
    for number, folder in enumerate(FORMATS, start=1):
        (found,) = checkpoints(folder)
        assert json.loads((found / "manifest.json").read_text())["format_version"] == number
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 20_000


@pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)
def test_golden_checkpoint_is_resumed_and_trains_on_to_the_known_model(folder, tmp_path):
    num_ranks = find_newest(folder)[0].num_ranks
    assert num_ranks == (1 if folder.name == "format_1" else NUM_RANKS)
    if num_ranks == 1:
        stood_at = [train_on(ALONE, folder, tmp_path)]
    else:
        stood_at = on_ranks(train_on, num_ranks, folder, tmp_path)
    assert stood_at == [(ROUNDS_BEFORE, ROUNDS_BEFORE * 8, 1)] * num_ranks
    expected, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert expected.keys() == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


def test_setting_newer_than_a_checkpoint_is_named_with_what_it_stood_for():
    newer = dataclasses.replace(AS_THEY_HAD_IT, rate_scaling="sqrt")
    with pytest.raises(CheckpointError, match=r"\(averaging.rate_scaling: none → sqrt\)"):
        trainer(resume=FORMATS[0], averaging=newer)


def test_golden_model_is_not_where_a_fresh_run_ends():
    """So that a resume that read nothing would be noticed."""
    fresh = trainer(seed=1).fit(max_rounds=ROUNDS_AFTER).model
    for folder in FORMATS:
        expected = load_file(folder / "model.safetensors")
        assert not torch.allclose(fresh.state_dict()["0.weight"], expected["0.weight"], rtol=0.1)
