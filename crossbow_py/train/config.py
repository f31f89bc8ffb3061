"""The configuration of `crossbow_py.train`: its keys, its groups, and its usage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from crossbow_py.averaging import RULES
from crossbow_py.cli.configuration import Registry, from_plain, group, group_options, read_option, to_plain
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import setting, suggestion
from crossbow_py.data.sources import SOURCES
from crossbow_py.engine.update.optimizers import OPTIMIZERS
from crossbow_py.models import MODELS
from crossbow_py.models.base import ModelSettings
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD, LoggerName, check_loggers
from crossbow_py.train.checkpoints.weights import load_weights
from crossbow_py.train.run_settings import JobOptions, JobSettings, RunOptions, RunSettings, StopConditions
from crossbow_py.train.schedules import SCHEDULES

_USAGE = """\
usage: python -m crossbow_py.train [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [-m] [--list] [--help]

Trains several learners at once and keeps them together by synchronous model averaging.

  python -m crossbow_py.train +experiment=digits
  python -m crossbow_py.train +experiment=lenet num_learners=4 optimizer.learning_rate=0.05
  python -m crossbow_py.train model=resnet20 data=cifar10 data.root=/data max_epochs=5
  python -m crossbow_py.train -m +experiment=digits seed=1,2,3

  +experiment=NAME   a complete run; --list shows them
  +debug=fast        two rounds of everything, to see whether a configuration works
  config=RUN         what the config.yaml in that run's folder says, in a new folder; other keys are laid over it
  -m, --multirun     run every combination of comma-separated values, each in its own folder
  --list             the experiments and the options of every group
  --completion SHELL a script that completes all commands' words in bash, zsh or fish; source it
  --help             this text

Exit codes: 0 done, 2 a mistake in what was asked for, 143 after SIGTERM, 130 after Ctrl-C, 1 anything else.
"""


@dataclass(frozen=True, kw_only=True)
class JobConfig(JobOptions, JobSettings):
    """The configuration that runs and searches share. A group holds the settings object that its `name` chooses."""

    CONF: ClassVar[str]
    USAGE: ClassVar[str]
    GROUPS: ClassVar[Mapping[str, Registry]] = {
        "model": MODELS, "data": SOURCES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES,
    }  # fmt: skip
    MEANINGS: ClassVar[Mapping[str, str]] = {}
    LAID_OVER: ClassVar[Mapping[str, Callable[[Any, str, Any], Any]]] = {}
    TAKES_RECIPES: ClassVar[bool] = True
    NEEDS_FOLDER: ClassVar[bool] = True
    PATHS: ClassVar[Sequence[str]] = ("resume", "output_dir", "init_from")

    checkpoint_every_s: float | None = setting(None, "seconds between checkpoints; null for none", above=0)
    metrics: dict[str, Any] = setting(
        {},
        "further metrics of evaluations: metrics.NAME.target=package.module.name, with its arguments beside it, as in "
        "metrics.f1.num_classes=10",
    )
    logger: tuple[LoggerName, ...] = setting(
        (TENSORBOARD,), "what records it beside its own files: a list of tensorboard, mlflow and wandb; [] is nothing"
    )
    model: Any = group("the network")
    data: Any = group("the data set, its augmentation and where its files are")
    optimizer: Any = group("each learner's own optimizer")
    schedule: Any = group("the learning rate as a function of samples seen")

    def __post_init__(self) -> None:
        check_loggers(self.logger)
        super().__post_init__()
        for key in self.PATHS:
            if (path := getattr(self, key)) is not None:
                given_path(key, path)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(JobConfig, RunOptions, RunSettings, StopConditions):
    """The whole configuration of `crossbow_py.train`."""

    CONF: ClassVar[str] = "train"
    USAGE: ClassVar[str] = _USAGE
    GROUPS: ClassVar[Mapping[str, Registry]] = {**JobConfig.GROUPS, "averaging": RULES}

    max_epochs: float | None = setting(10.0, "stop after this many passes over the training set", above=0)
    listeners: tuple[str, ...] = setting(
        (), "listeners of your own: a list of dotted names of classes, or of functions that return one"
    )
    checkpoint_every_epochs: int | None = setting(1, "epochs between checkpoints; null for none", minimum=1)
    keep_checkpoints: int = setting(2, "how many of the newest checkpoints to keep", minimum=1)
    averaging: Any = group("how the learners are kept together")

    def __post_init__(self) -> None:
        super().__post_init__()
        StopConditions.__post_init__(self)


def config_from_mapping(plain: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Build the configuration from plain values, as in a run's config.yaml.

    Raises UserError, which names the key, and also `file` where it is given: where the values were read from.
    """
    try:
        return from_plain(plain, TrainConfig)
    except UserError as error:
        if file is None:
            raise
        raise UserError(f"{file}: {error}") from error


def config_to_mapping(config: JobConfig) -> dict[str, Any]:
    """Return the plain values of a configuration, with every default: the inverse of `config_from_mapping`."""
    return to_plain(config)


def first_model(
    model: ModelSettings, input_shape: tuple[int, ...], num_classes: int | None, init_from: str | Path | None
) -> nn.Module:  # fmt: skip
    """Make a model with the weights that training begins with, those of the file `init_from` if there is one.

    Raises UserError.
    """
    module = model.make(input_shape, num_classes or 0)
    if init_from is not None:
        load_weights(module, given_path("init_from", init_from))
        if hasattr(module, "initialise_from"):
            module.initialise_from = None  # type: ignore[assignment]  # what it would take from data is in the file
    return module


def with_values(
    plain: Mapping[str, Any], values: Mapping[str, Any], what: str,
    nothing_beneath: Callable[[str, str], str] = lambda key, known: f"{key}: a run has nothing beneath {known!r}",
) -> TrainConfig:  # fmt: skip
    """Build the configuration of a run that differs from `plain`.

    Args:
        plain: plain values of all keys; not changed.
        values: what differs: dotted keys, and names of options of groups.
        what: what the values are called in messages.
        nothing_beneath: a sentence on a key beneath one that has nothing beneath it.

    Raises UserError for a key or a value that a run does not have.
    """
    whole: dict[str, Any] = copy.deepcopy({**plain})
    for key, value in sorted(values.items(), key=lambda pair: "." in pair[0]):  # groups before what is in them
        if key in TrainConfig.GROUPS:
            options = group_options(key, TrainConfig)
            if value not in options:
                raise UserError(f"{what}: unknown {key} {value!r}{suggestion(str(value), options)}")
            if value != whole[key]["name"]:  # what is configured keeps what it was given
                whole[key] = read_option(key, value)
            continue
        *path, last = key.split(".")
        found: Any = whole
        for depth, name in enumerate(path):
            found = found.get(name)
            if not isinstance(found, dict):
                raise UserError(nothing_beneath(key, ".".join(path[: depth + 1])))
        found[last] = value
    return config_from_mapping(whole)
