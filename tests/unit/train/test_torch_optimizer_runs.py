"""Runs with an optimizer of torch: resumed to the bit, configured by text, refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py import SMA, UserError
from crossbow_py.averaging import LocalSGD, SynchronousSGD
from crossbow_py.optimizers import TorchOptimizer
from crossbow_py.train.config import config_from_mapping, config_to_mapping
from tests.trainers import blobs, image_trainer, make_trainer, weights

NADAM = TorchOptimizer(learning_rate=0.01, target=torch.optim.NAdam, args={"betas": [0.8, 0.99]})


@pytest.mark.slow
@pytest.mark.parametrize("averaging", [SMA(), SynchronousSGD(), LocalSGD()], ids=lambda rule: rule.NAME)
def test_resumed_run_ends_with_the_bits_of_one_that_ran_through(tmp_path: Path, averaging: Any) -> None:
    def trainer(name: str, resume: str | None = None, optimizer: Any = NADAM) -> Any:
        return image_trainer(output_dir=tmp_path / name, resume=resume, optimizer=optimizer, averaging=averaging)

    trainer("whole").fit(max_rounds=15)
    trainer("parts").fit(max_rounds=6)
    trainer("parts", "auto").fit(max_rounds=9)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    other = TorchOptimizer(learning_rate=0.01, target=torch.optim.NAdam)
    with pytest.raises(UserError, match=r"is of another run \(optimizer.args"):
        trainer("parts", "auto", other)


def test_number_of_learners_grows_and_shrinks_with_their_states() -> None:
    wanted = iter([None, 3, None, 2, None, 4, *[None] * 100])
    trainer = make_trainer(optimizer=NADAM, num_learners="auto", max_learners=4, test_data=blobs(12))
    result = trainer.fit(max_rounds=40, after_round=lambda _: next(wanted))
    assert result.test_accuracy == 1.0


def test_non_finite_learner_is_reseeded_and_trains_on() -> None:
    trainer = make_trainer(optimizer=NADAM, on_nonfinite="reseed")
    trainer.fit(max_rounds=3)
    trainer.run.bank.weights.shaped(1)["weight"].fill_(torch.nan)
    trainer.fit(max_rounds=12)
    assert trainer.state.num_reseeded == 1
    assert all(own.tensors() for own in trainer.run.bank.optimizers)


def test_state_of_any_form_is_not_averaged() -> None:
    with pytest.raises(UserError, match=r"restart_momentum=average has no meaning .* set averaging.restart_mom"):
        make_trainer(optimizer=NADAM, averaging=SMA(restart_momentum="average"))


def test_replicas_of_another_rank_come_with_its_state() -> None:
    bank = make_trainer(optimizer=NADAM, averaging=SynchronousSGD()).run.bank
    assert len(bank.replica_tensors(0)) == 2  # decayed and undecayed weights, no state yet
    trainer = make_trainer(optimizer=NADAM, averaging=SynchronousSGD())
    trainer.fit(max_rounds=2)
    assert len(trainer.run.bank.replica_tensors(0)) == 2 + 2 * 4  # NAdam's step, mu_product and two means
    assert len(trainer.run.bank.replica_tensors(0, has_state=False)) == 2


def test_class_is_written_in_a_configuration_as_its_path() -> None:
    chosen = {"model": "mlp", "data": "digits", "schedule": "constant", "averaging": "sma"}
    plain: dict[str, Any] = {group: {"name": name} for group, name in chosen.items()}
    plain["optimizer"] = {"name": "torch", "target": "torch.optim.RMSprop", "args": {"alpha": 0.9}}
    config = config_from_mapping(plain)
    assert config_from_mapping(config_to_mapping(config)) == config
    of_class = config_from_mapping({**plain, "optimizer": {**plain["optimizer"], "target": torch.optim.RMSprop}})
    assert config_to_mapping(of_class)["optimizer"]["target"] == "torch.optim.rmsprop.RMSprop"
