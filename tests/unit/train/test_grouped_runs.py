"""Runs whose parameters are in groups: what stays frozen, what a resume takes, and how keys are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, Muon, Trainer, UserError
from crossbow_py.train.config import config_from_mapping, config_to_mapping
from tests.trainers import deeper_image_model, image_trainer, weights

GROUPS = ({"names": "0", "frozen": True}, {"names": "7.*", "rate": 3.0, "clip_norm": 0.1})
CHOSEN = {"model": "mlp", "data": "digits", "schedule": "constant", "averaging": "sma"}


def trainer(folder: Path, groups: Any = GROUPS, **options: Any) -> Trainer:
    optimizer = SGD(learning_rate=0.05, weight_decay=0.01, groups=groups)
    return image_trainer(output_dir=folder, optimizer=optimizer, **options)


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_frozen_group_keeps_its_first_weights_and_others_do_not(tmp_path: Path, executor: str) -> None:
    ours = trainer(tmp_path, executor=executor)
    before = {name: value.clone() for name, value in ours.run.bank.z.shaped().items()}
    after = dict(ours.fit(max_rounds=4).model.named_parameters())
    assert [name for name, value in after.items() if torch.equal(value, before[name])] == ["0.weight"]


def test_resumed_run_ends_with_the_bits_of_one_that_ran_through_and_takes_no_other_groups(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").fit(max_rounds=9)
    trainer(tmp_path / "parts").fit(max_rounds=4)
    trainer(tmp_path / "parts", resume="auto").fit(max_rounds=5)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(UserError, match=r"is of another run \(optimizer.groups: "):
        trainer(tmp_path / "parts", GROUPS[:1], resume="auto")


def test_group_of_no_parameter_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer.groups: head.\* matches no parameter of the model; known: 0, 1, 7"):
        trainer(tmp_path, [{"names": "head.*", "rate": 2}])


def normed_model() -> nn.Module:
    norm = nn.GroupNorm(2, 8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))


def test_group_norm_on_frozen_layers_which_ends_the_process_in_channels_last_is_refused() -> None:
    optimizer = SGD(groups=[{"names": "0", "frozen": True}])
    with pytest.raises(UserError, match=r"the model's 1 is a GroupNorm .* on what is frozen.* channels_last=false"):
        image_trainer(model=normed_model, optimizer=optimizer)
    image_trainer(model=normed_model, optimizer=optimizer, channels_last=False).fit(max_rounds=2)
    both = SGD(groups=[{"names": "[01].*", "frozen": True}])
    image_trainer(model=normed_model, optimizer=both).fit(max_rounds=2)
    image_trainer(model=normed_model).fit(max_rounds=2)


def test_muon_of_groups_trains_with_threads_and_fused() -> None:
    optimizer = Muon(learning_rate=0.01, groups=[{"names": "1", "rate": 2.0}, {"names": "0", "frozen": True}])
    for executor in ("threads", "fused"):
        result = image_trainer(model=deeper_image_model, optimizer=optimizer, executor=executor).fit(max_rounds=3)
        assert all(value.isfinite().all() for value in result.model.parameters())


def test_groups_of_a_configuration_are_written_as_they_are_read() -> None:
    plain: dict[str, Any] = {group: {"name": name} for group, name in CHOSEN.items()}
    plain["optimizer"] = {"name": "adamw", "groups": [{"names": "*.bias", "weight_decay": 0.5}]}
    config = config_from_mapping(plain)
    assert config.optimizer.groups[0].weight_decay == 0.5
    assert config_from_mapping(config_to_mapping(config)) == config
