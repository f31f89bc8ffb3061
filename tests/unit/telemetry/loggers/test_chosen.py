"""Loggers and listeners by their names on the command line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from crossbow_py import Listener
from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.loggers import MLflowLogger, WandbLogger
from crossbow_py.search.config import SearchConfig
from crossbow_py.telemetry.loggers import tracker
from crossbow_py.telemetry.loggers.chosen import listeners_of, loggers_of
from crossbow_py.train.config import TrainConfig


class Heard(Listener):
    """A listener."""


HEARD = Heard()


def heard() -> Listener:
    """Return one."""
    return HEARD


def nothing() -> None:
    """Return none."""


def broken() -> Listener:
    """Raise."""
    raise ValueError("no such file")


def refused() -> Listener:
    """Raise what is for the user."""
    raise UserError("listeners of mine need a key; set it.")


@pytest.mark.parametrize("kind", [TrainConfig, SearchConfig])
@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("seed=0", ("tensorboard",)),
        ("logger=[]", ()),
        ("logger=[mlflow]", ("mlflow",)),
        ("logger=[wandb,tensorboard]", ("wandb", "tensorboard")),
    ],
)
def test_loggers_are_those_that_are_named(kind: type[Any], word: str, names: tuple[str, ...]) -> None:
    space = ["space.seed=[1,2]"] if kind is SearchConfig else []
    assert compose([word, *space], kind).logger == names


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("logger=nope", "unknown logger 'nope'; known: mlflow, tensorboard, wandb."),
        ("logger=[tensorbord]", "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("logger=[mlflow,3]", "unknown logger 3; known: mlflow, tensorboard, wandb."),
        ("logger=[mlflow,mlflow]", "logger has mlflow 2 times; name it once."),
        (
            "logger=mlflow",
            "logger must be a list, each one of tensorboard, mlflow, wandb, got 'mlflow'; write logger=[mlflow].",
        ),
        ("logger=null", "logger must be a list, each one of tensorboard, mlflow, wandb, got None."),
        ("listeners=a.b", "listeners must be a list, each text, got 'a.b'; write listeners=[a.b]."),
        ("loggers=[mlflow]", "unknown key loggers; did you mean 'logger'?"),
        ("callbacks=[a.b]", "unknown key callbacks; did you mean 'listeners'?"),
    ],
)
def test_what_is_no_list_of_names_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        compose([word], TrainConfig)
    assert str(refused.value) == message


def test_search_has_no_listeners() -> None:
    with pytest.raises(UserError, match="unknown key listeners, which is for python -m crossbow_py.train"):
        compose(["listeners=[a.b]", "space.seed=[1,2]"], SearchConfig)


@pytest.mark.parametrize(
    ("key", "make", "name"), [("mlflow", MLflowLogger, "MLflow"), ("wandb", WandbLogger, "Weights & Biases")]
)
def test_service_that_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, key: str, make: Any, name: str
) -> None:
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda module: None)
    message = f'logger=[{key}] needs {name}, which is not installed; run pip install "crossbow_py[{key}]", or leave'
    with pytest.raises(UserError, match=re.escape(message)):
        loggers_of([key])
    with pytest.raises(UserError, match=re.escape(message)):
        make()


def test_listeners_are_made_of_classes_and_functions_in_their_order() -> None:
    first, second = listeners_of([f"{__name__}.heard", f"{__name__}.Heard"])
    assert first is HEARD
    assert type(second) is Heard and second is not HEARD


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.fn", "listeners=nowhere.fn cannot be imported (ModuleNotFoundError"),
        (f"{__name__}.missing", "cannot be imported (AttributeError"),
        ("fn", "listeners must be a dotted path such as package.module.function, got 'fn'."),
        (f"{__name__}.HEARD", f"listeners={__name__}.HEARD must be callable, got Heard; name a function or a class."),
        (f"{__name__}.nothing", f"listeners={__name__}.nothing must make a crossbow_py.Listener, got NoneType; name"),
        ("builtins.dict", "listeners=builtins.dict must make a crossbow_py.Listener, got dict; name a subclass"),
        (f"{__name__}.broken", "is called without arguments, and failed with ValueError: no such file; correct it."),
        ("builtins.getattr", "listeners=builtins.getattr is called without arguments, and failed with TypeError"),
        (f"{__name__}.refused", "listeners of mine need a key; set it."),
    ],
)
def test_target_that_makes_no_listener_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        listeners_of([path])
