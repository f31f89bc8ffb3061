"""What other libraries call our keys: every entry leads to a key that exists, in Python and on the command line."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from crossbow_py import Trainer
from crossbow_py.cli.configuration import compose
from crossbow_py.core import other_names
from crossbow_py.core.errors import UserError
from crossbow_py.predict.config import PredictConfig
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.run_settings import RunSettings
from tests.trainers import make_trainer

KEYWORDS = {*inspect.signature(Trainer).parameters, *inspect.signature(Trainer.fit).parameters} | {
    field.name for field in dataclasses.fields(RunSettings)
}
KEYS = {field.name for field in dataclasses.fields(TrainConfig)}


def exists(key: str) -> bool:
    group, _, name = key.partition(".")
    options = TrainConfig.GROUPS.get(group, {}).values()
    return key in KEYS | KEYWORDS or any(
        field.name == name for option in options for field in dataclasses.fields(option)
    )


def test_every_entry_leads_to_what_exists_and_hides_no_key_of_ours() -> None:
    assert [key for key in other_names._WORDS if not exists(key)] == []
    words = [word for words in other_names._WORDS.values() for word in words.split()]
    assert sorted(set(words)) == sorted(words)
    assert {*words, *other_names._OTHERWISE} & (KEYS | KEYWORDS) == set()


@pytest.mark.parametrize(
    ("word", "python", "key"),
    [
        ("lr", r"optimizer=SGD\(learning_rate=\.\.\.\)", "'optimizer.learning_rate'"),
        ("momentum", r"optimizer=SGD\(momentum=", "'optimizer.momentum'"),
        ("gradient_clip_val", r"optimizer=SGD\(clip_norm=", "'optimizer.clip_norm'"),
        ("warmup_steps", r"schedule=Cosine\(warmup_epochs=", "'schedule.warmup_epochs'"),
        ("epochs", r"fit\(max_epochs=", "'max_epochs'"),
        ("early_stopping", r"fit\(patience=", "'patience'"),
        ("restore_best_weights", r"fit\(restore_best=", "'restore_best'"),
        ("bs", "batch_size=", "'batch_size'"),
        ("workers", "num_workers=", "'num_workers'"),
        ("val_data", "validation_data=", "'data.validation_fraction'"),
        ("validation_split", "validation_data=", "'data.validation_fraction'"),
        ("train_dataset", "train_data=", "'data'"),
        ("save_top_k", r"checkpoint=CheckpointSettings\(keep=", "'keep_checkpoints'"),
        ("loggers", r"callbacks=\[MLflowLogger\(\)\]", "'logger'"),
        ("cbs", r"callbacks=\.\.\.", "'listeners'"),
        ("criterion", "loss=", "Trainer(loss=...)"),
        ("gpus", "torchrun --nproc-per-node=N", "torchrun --nproc-per-node=N"),
    ],
)
def test_name_of_another_library_is_refused_with_ours(word: str, python: str, key: str) -> None:
    options: dict[str, Any] = {word: 1}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'; .*{python}"):
        make_trainer(**options)
    with pytest.raises(UserError) as raised:
        compose([f"{word}=1"], TrainConfig)
    assert str(raised.value).startswith(f"unknown key {word}; ") and key in str(raised.value)


def test_stop_given_to_the_trainer_and_setting_given_to_fit_are_sent_where_they_belong() -> None:
    with pytest.raises(TypeError, match=r"argument 'max_epochs'; did you mean fit\(max_epochs=\.\.\.\)\?"):
        make_trainer(max_epochs=3)
    trainer = make_trainer()
    fit = {"batch_size": r"Trainer\(batch_size=", "lr": r"Trainer\(optimizer=SGD\(", "epochs": "max_epochs="}
    for word, meant in fit.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'; did you mean {meant}"):
            trainer.fit(**{word: 1})
    with pytest.raises(TypeError, match="'max_epoch'; did you mean 'max_epochs'"):
        trainer.fit(max_epoch=1)


def test_command_without_the_key_does_not_suggest_it() -> None:
    with pytest.raises(UserError) as raised:
        compose(["early_stopping=3"], PredictConfig)
    assert "did you mean 'patience'" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "python"),
    [("logger", "callbacks=[MLflowLogger()] or callbacks=[WandbLogger()]"), ("listeners", "callbacks=[...]")],
)
def test_key_of_the_command_line_that_python_has_otherwise_is_refused_with_that(key: str, python: str) -> None:
    with pytest.raises(TypeError) as raised:
        make_trainer(**{key: []})
    assert str(raised.value) == f"unexpected keyword argument {key!r}; did you mean {python}?"
