"""Runs whose parameters are in groups: what stays frozen, what a resume takes, and how keys are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py import SGD, Trainer, UserError
from crossbow_py.train.config import config_from_mapping, config_to_mapping
from tests.trainers import image_trainer, weights

GROUPS = ({"names": "0", "frozen": True}, {"names": "7.*", "rate": 3.0, "clip_norm": 0.1})
CHOSEN = {"model": "mlp", "data": "digits", "schedule": "constant", "averaging": "sma"}


def trainer(folder: Path, groups: Any = GROUPS, **options: Any) -> Trainer:
    optimizer = SGD(learning_rate=0.05, weight_decay=0.01, groups=groups)
    return image_trainer(output_dir=folder, optimizer=optimizer, **options)


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_frozen_group_keeps_its_first_weights_and_others_do_not(tmp_path: Path, executor: str) -> None:
    ours = trainer(tmp_path, executor=executor)
    before = {name: value.clone() for name, value in ours.run.bank.central_state().items()}
    after = dict(ours.fit(max_rounds=4).model.named_parameters())
    assert [name for name, value in after.items() if torch.equal(value, before[name])] == ["0.weight"]


def test_resumed_run_ends_with_the_bits_of_one_that_ran_through_and_takes_no_other_groups(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").fit(max_rounds=9)
    trainer(tmp_path / "parts").fit(max_rounds=4)
    trainer(tmp_path / "parts", resume="auto").fit(max_rounds=5)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(UserError, match=r"is of another run \(optimizer.groups: "):
        trainer(tmp_path / "parts", GROUPS[:1], resume="auto")


def test_groups_of_a_configuration_are_written_as_they_are_read() -> None:
    plain: dict[str, Any] = {group: {"name": name} for group, name in CHOSEN.items()}
    plain["optimizer"] = {"name": "adamw", "groups": [{"names": "*.bias", "weight_decay": 0.5}]}
    config = config_from_mapping(plain)
    assert config.optimizer.groups[0].weight_decay == 0.5
    assert config_from_mapping(config_to_mapping(config)) == config
