"""`config=RUN`, which begins a command with a run's recorded configuration; and the command of a configuration.

A recorded configuration is turned into overrides for everything that is not the default. They come before the user's
own overrides, which can therefore change anything in it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.cli.configuration import C, compose, group_options
from crossbow_py.cli.overrides import as_override, read_text
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.plain_values import filled
from crossbow_py.core.settings import written
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD
from crossbow_py.telemetry.records import CONFIG_FILE
from crossbow_py.train.checkpoints.checkpoint import lost_rule, renamed, upgraded
from crossbow_py.train.checks.compatibility import check_learning
from crossbow_py.train.config import TrainConfig, config_from_mapping, config_to_mapping

_KEY = "config="
_OF_THE_RUN = {"output_dir": None, "resume": None}  # keys of the recorded run that are not taken over
_KEY_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_/-]*")  # the grammar of overrides has no quotes for keys
_LONGEST_SHOWN = 80


def composed(overrides: Sequence[str], kind: type[C], config_name: str | None = None) -> C:
    """Compose a configuration; with `config=RUN` the other overrides are applied to that run's configuration.

    Raises UserError as `compose` does, if settings do not fit each other, and if the run has no configuration or the
    command does not take `config`.
    """
    config = _composed(overrides, kind, config_name)
    if isinstance(config, TrainConfig):
        check_learning(config, config.optimizer, config.averaging)
    return config


def _composed(overrides: Sequence[str], kind: type[C], config_name: str | None) -> C:
    given = [read_text("config", text.removeprefix(_KEY)) for text in overrides if text.startswith(_KEY)]
    if not given:
        return compose(overrides, kind, config_name)
    own = [text for text in overrides if not text.startswith(_KEY)]
    if kind.CONF != TrainConfig.CONF:
        raise UserError(f"config={given[0]} is for the commands train and estimate; leave it out.")
    if len(given) > 1:
        raise UserError(f"config is given {len(given)} times; give it once.")
    keys = [text.lstrip("+~").split("=")[0] for text in own]
    if config_name is not None:
        raise UserError(f"config={given[0]} begins with a run, and -cn with a file; leave one of them out.")
    if "experiment" in keys:
        raise UserError(f"config={given[0]} is a whole run, as +experiment is; leave one of them out.")
    chosen = [key for key in keys if key in kind.GROUPS]
    run = recorded(given[0])
    _check_targets(run, given[0], keys, [text for text in own if text.startswith("~")])
    words = [text for text in overrides_of(run) if text.split("=")[0].split(".")[0] not in chosen]
    return compose([*words, *own], kind)


def _check_targets(run: TrainConfig, path: str, keys: Sequence[str], deleted: Sequence[str]) -> None:
    """Raise UserError for code and services that the run names and the user does not: it may be somebody else's."""
    targets = dict[str, Any]()
    for group in TrainConfig.GROUPS:
        if group not in keys:
            targets |= named_targets(group, getattr(run, group))
    for name, entry in run.metrics.items() if "~metrics" not in deleted else ():
        # metrics={...} alone would be laid over the recorded ones.
        targets[f"metrics.{name}.target"] = entry.get("target") if isinstance(entry, Mapping) else entry
    told = {
        "listeners": (run.listeners, "code that would be run"),
        "logger": (() if set(run.logger) <= {TENSORBOARD} else run.logger, "which would record under your account"),
    }
    for key, (names, what) in told.items():
        if names and key not in keys:
            again = f"{key}={written(names)}"
            raise UserError(f"config={path} names {again}, {what}; if it is yours, say it again: {again}.")
    for key, target in targets.items():
        is_deleted = key.count(".") > 1 and f"~{key.removesuffix('.target')}" in deleted
        if target is not None and key not in keys and not is_deleted:
            raise UserError(
                f"config={path} names {key}={target}, code that would be run; if it is yours, say it again: "
                f"{key}={target}."
            )


def named_targets(group: str, settings: Any) -> dict[str, Any]:
    """Return the code that the settings of a group name, by the key that names it."""
    found = {f"{group}.target": getattr(settings, "target", None)}
    for name in ("transform", "test_transform"):
        entry = getattr(settings, name, None) or {}
        found[f"{group}.{name}.target"] = entry.get("target")
    return {key: target for key, target in found.items() if target is not None}


def recorded(path: str) -> TrainConfig:
    """Return a run's configuration, given its folder or its config.yaml, without its `output_dir` and `resume`.

    Raises UserError.
    """
    asked = given_path("config", path)
    file = asked / CONFIG_FILE if asked.is_dir() else Path(os.path.realpath(asked))  # of a circle of links, too
    if not file.is_file():
        raise UserError(f"config={path} is neither the folder of a run nor a {CONFIG_FILE}; give one of them.")
    plain = renamed(read_yaml(file))
    if "space" in plain:
        raise UserError(f"config={path} is of a search, which holds many runs; give the folder best in it.")
    if lost_rule(plain):
        raise UserError(
            f"config={path} is of averaging=grouped_sma with Crossbow's average model, which this version does not "
            "have; start from a recipe, or copy what else it says to the command line."
        )
    _check_keys(path, plain)
    plain.update(_OF_THE_RUN)
    kept = config_to_mapping(config_from_mapping(plain, file))
    return config_from_mapping(filled(upgraded(plain, kept), kept))


def _check_keys(path: str, plain: Any) -> None:
    """Raise UserError for keys that a command line would read differently.

    For example, `x:${oc.env:NAME},y` would be read as two keys and a value.
    """
    if isinstance(plain, Mapping):
        for key in plain:
            if not isinstance(key, int) and not (isinstance(key, str) and _KEY_TEXT.fullmatch(key)):
                shown = ascii(key)[:_LONGEST_SHOWN]
                raise UserError(f"config={path} must have keys of letters, digits, _, / and -, got {shown}; rename it.")
    if isinstance(plain, Mapping | list):
        for value in plain.values() if isinstance(plain, Mapping) else plain:
            _check_keys(path, value)


def overrides_of(config: TrainConfig) -> list[str]:
    """Return overrides that compose to exactly this run: its recipe, if it has one, and everything that differs.

    A recipe that this version does not have is spelled out in full; only its name is lost.
    """
    has_recipe = config.experiment in group_options("experiment", TrainConfig)
    chosen = [f"+experiment={config.experiment}"] if has_recipe else []
    for group in TrainConfig.GROUPS:
        name = getattr(config, group).NAME
        chosen += [f"{group}={name}"] if name in group_options(group, TrainConfig) else []
    default = config_to_mapping(compose(chosen, TrainConfig))
    return [*chosen, *_differing(default, {**config_to_mapping(config), "experiment": default["experiment"]})]


def train_command(config: TrainConfig) -> str:
    """Return the command line that trains exactly this run."""
    return " ".join(["python -m crossbow_py.train", *map(shlex.quote, overrides_of(config))])


def _differing(default: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> list[str]:
    words: list[str] = []
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(default.get(key), Mapping) and value and default[key]:
            words += _differing(default[key], value, f"{prefix}{key}.")
        elif default.get(key) != value:
            words.append(f"{prefix}{key}={as_override(value)}")
    return words
