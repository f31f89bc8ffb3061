"""`config=RUN`: a run's recorded configuration as the beginning of another command; and the command of a configuration.

A configuration is turned into the overrides that say what of it is not the default, and these stand before the user's
own: so everything that can be said of a run can be said on top of a recorded one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.cli.configuration import C, compose, group_options
from crossbow_py.cli.overrides import read_text
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.plain_values import filled
from crossbow_py.telemetry.records import CONFIG_FILE
from crossbow_py.train.checkpoints.checkpoint import formerly
from crossbow_py.train.config import TrainConfig, config_from_mapping, config_to_mapping

_KEY = "config="
_OF_THE_RUN = {"output_dir": None, "resume": None}  # where that run wrote, and what it went on from
# Text that is nothing else without quotes.
_PLAIN_TEXT = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[A-Za-z_/][A-Za-z0-9_./]*", re.IGNORECASE)
_KEY_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_/-]*")  # the grammar of overrides has no quotes for keys
_LONGEST_SHOWN = 80


def composed(overrides: Sequence[str], kind: type[C]) -> C:
    """As `compose`; with `config=RUN` among the overrides they are laid over what that run was told.

    Raises UserError also for a run that has no configuration, and where the command takes none.
    """
    given = [read_text("config", text.removeprefix(_KEY)) for text in overrides if text.startswith(_KEY)]
    if not given:
        return compose(overrides, kind)
    own = [text for text in overrides if not text.startswith(_KEY)]
    if kind.CONF != TrainConfig.CONF:
        raise UserError(f"config={given[0]} is for the commands train and estimate; leave it out.")
    if len(given) > 1:
        raise UserError(f"config is given {len(given)} times; give it once.")
    keys = [text.lstrip("+~").split("=")[0] for text in own]
    if "experiment" in keys:
        raise UserError(f"config={given[0]} is a whole run, as +experiment is; leave one of them out.")
    chosen = [key for key in keys if key in kind.GROUPS]
    run = recorded(given[0])
    _check_targets(run, given[0], keys)
    words = [text for text in overrides_of(run) if text.split("=")[0].split(".")[0] not in chosen]
    return compose([*words, *own], kind)


def _check_targets(run: TrainConfig, path: str, keys: Sequence[str]) -> None:
    """A run's folder may be somebody else's: what code it names is to be said again. Raises UserError."""
    for group in TrainConfig.GROUPS:
        target = getattr(getattr(run, group), "target", None)
        if target is not None and group not in keys and f"{group}.target" not in keys:
            raise UserError(
                f"config={path} names {group}.target={target}, code that would be run; if it is yours, say it again: "
                f"{group}.target={target}."
            )


def recorded(path: str) -> TrainConfig:
    """What a run was told, given its folder or its config.yaml, but for where it wrote and what it went on from.

    Raises UserError.
    """
    asked = given_path("config", path)
    file = asked / CONFIG_FILE if asked.is_dir() else asked.resolve()
    if not file.is_file():
        raise UserError(f"config={path} is neither the folder of a run nor a {CONFIG_FILE}; give one of them.")
    plain = read_yaml(file)
    if "space" in plain:
        raise UserError(f"config={path} is of a search, which holds many runs; give the folder best in it.")
    _check_keys(path, plain)
    plain.update(_OF_THE_RUN)
    kept = config_to_mapping(config_from_mapping(plain, file))
    return config_from_mapping(filled(filled(plain, formerly(kept)), kept))


def _check_keys(path: str, plain: Any) -> None:
    """Refuse keys that a command line would not take as they are: `x:${oc.env:NAME},y` would be two, and a value.

    Raises UserError.
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
    """The overrides that compose to this very run: its recipe, where it has one, and everything that differs.

    Of a recipe that is not here, such as one of a later version, the name alone is lost.
    """
    has_recipe = config.experiment in group_options("experiment", TrainConfig)
    chosen = [f"+experiment={config.experiment}"] if has_recipe else []
    for group in TrainConfig.GROUPS:
        name = getattr(config, group).NAME
        chosen += [f"{group}={name}"] if name in group_options(group, TrainConfig) else []
    default = config_to_mapping(compose(chosen, TrainConfig))
    return [*chosen, *_differing(default, {**config_to_mapping(config), "experiment": default["experiment"]})]


def train_command(config: TrainConfig) -> str:
    """The command line that trains this very run: everything that is not the default."""
    return " ".join(["python -m crossbow_py.train", *map(shlex.quote, overrides_of(config))])


def _differing(default: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> list[str]:
    words: list[str] = []
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(default.get(key), Mapping) and value and default[key]:
            words += _differing(default[key], value, f"{prefix}{key}.")
        elif default.get(key) != value:
            words.append(f"{prefix}{key}={as_override(value)}")
    return words


def as_override(value: Any) -> str:
    """A plain value as Hydra's command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    return value if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) else _quoted(value)


def _quoted(value: Any) -> str:
    """Text in quotes, in which backslashes count only before a quote; a number as it is.

    What looks like an interpolation stays text: it may come from the folder of somebody else's run.
    """
    if not isinstance(value, str):
        return str(value)
    value = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value) + '"'
