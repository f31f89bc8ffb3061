"""The command line's configuration: YAML groups composed by Hydra, turned once into plain frozen dataclasses.

Hydra is called through its compose interface inside our own main, so it neither changes folders, nor logs, nor writes a
`.hydra` folder. Group choices are checked against the option files first; values are then set whatever the option file
spells out, because the settings dataclasses know every key and answer a misspelled one with a suggestion. No
`DictConfig` leaves this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import hydra
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError

from crossbow_py.averaging import RULES
from crossbow_py.cli.config_files import (
    FILE_ERRORS,
    check_own_option,
    config_dir,
    first_comment,
    one_line_of,
    option_files,
    own_config_dir,
    read_yaml,
)
from crossbow_py.cli.overrides import PARSING_ERRORS, parse, quoted
from crossbow_py.core.errors import UserError
from crossbow_py.core.given_path import given_path
from crossbow_py.core.settings import check_no_group_left_out, from_mapping, setting, shown, suggestion, to_mapping
from crossbow_py.data.sources import SOURCES
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.executors import check_name
from crossbow_py.engine.sizing.units import parse_bytes
from crossbow_py.engine.update.optimizers import OPTIMIZERS
from crossbow_py.models import MODELS
from crossbow_py.search.space import laid_over
from crossbow_py.train.run_settings import RunSettings
from crossbow_py.train.schedules import SCHEDULES
from crossbow_py.train.stopping import StopConditions

REGISTRIES: dict[str, Mapping[str, type[Any]]] = {
    "model": MODELS,
    "data": SOURCES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "averaging": RULES,
}
APPENDED_GROUPS = ("experiment", "debug")  # not in the defaults list: chosen with a leading +, in this order
_COMPOSITION_ERRORS = (*PARSING_ERRORS, *FILE_ERRORS)
_COMMANDS = ("train", "search", "predict")  # that have a YAML file of their own


def _group(help: str) -> Any:
    return dataclasses.field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunSettings, StopConditions):
    """Everything `crossbow_py.train` can be told. The five groups hold the settings object chosen by their `name`."""

    GROUP: ClassVar[str] = ""
    CONF: ClassVar[str] = "train"  # the YAML file that says what holds when nothing else is said
    NEEDS_FOLDER: ClassVar[bool] = True  # what is done is recorded in any case

    experiment: str = setting("custom", "name of the run's recipe; chosen with +experiment=NAME")
    max_epochs: float | None = setting(10.0, "stop after that many passes over the training set", above=0)
    max_evaluation_batches: int | None = setting(None, "evaluate on at most that many batches; null is all", minimum=1)
    resume: str | None = setting(None, "null, auto (newest valid checkpoint) or the path of a run or checkpoint folder")
    init_from: str | None = setting(None, "safetensors file with the initial weights (fine-tuning)")
    output_dir: str | None = setting(None, "the run's folder; null is runs/<experiment>/<time>")
    trace: bool = setting(
        False, "write a timeline of tasks to trace.json in the run's folder (open it in ui.perfetto.dev)"
    )
    profile: bool = setting(False, "write which operators take the time to profile.txt and profile.json.gz")
    checkpoint_every_epochs: int | None = setting(1, "checkpoint every that many epochs; null never", minimum=1)
    checkpoint_every_s: float | None = setting(None, "checkpoint every that many seconds; null never", above=0)
    keep_checkpoints: int = setting(2, "newest checkpoints kept", minimum=1)
    distributed: DistributedSettings = dataclasses.field(
        default=DistributedSettings(), metadata={"help": "what several ranks, started by torchrun, do"}
    )
    model: Any = _group("the network")
    data: Any = _group("the data set, its augmentation and where its files are")
    optimizer: Any = _group("each learner's own optimizer")
    schedule: Any = _group("the learning rate as a function of samples seen")
    averaging: Any = _group("how the learners are kept together")

    def __post_init__(self) -> None:
        StopConditions.__post_init__(self)  # checks every field, and that the run has an end
        check_name(self.executor)
        for key in ("resume", "init_from", "output_dir"):
            if (path := getattr(self, key)) is not None:
                given_path(key, path)


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(TrainConfig):
    """Everything `crossbow_py.estimate` can be told: a run, and what is to be found out about it."""

    NEEDS_FOLDER: ClassVar[bool] = False

    memory: str | float | None = setting(
        None, "count for a device with that much memory (16GiB, 500MB, 8e9); null looks at this machine"
    )
    held_back: str | float | None = setting(
        None, "memory to leave free, an amount like those of memory; null is what the estimate says and why"
    )
    images_per_s: float | None = setting(
        None, "what the device trains, all learners together; null measures it on this machine", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        if self.held_back not in (None, 0, "0"):
            parse_bytes("held_back", self.held_back or 0)


class CommandConfig(Protocol):
    """What every command's configuration has: a frozen dataclass of what it can be told.

    Attributes:
        CONF: the YAML file that says what holds when nothing else is said.
        NEEDS_FOLDER: whether what is done is recorded in any case.
    """

    CONF: ClassVar[str]
    NEEDS_FOLDER: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def experiment(self) -> str:
        """Name of the folder of its kind."""

    @property
    def resume(self) -> str | None:
        """What to go on from."""

    @property
    def output_dir(self) -> str | None:
        """Its own folder."""


C = TypeVar("C", bound=CommandConfig)


def group_options(group: str) -> dict[str, str]:
    """Option names of a config group, each with the first comment line of its file.

    What is registered without a file of its own is an option too, with its default settings.
    """
    files = {name: first_comment(path) for name, path in option_files(group).items()}
    return dict(sorted({**dict.fromkeys(REGISTRIES.get(group, {}), ""), **files}.items()))


def read_option(group: str, option: str) -> dict[str, Any]:
    """The plain values in an option's file, or those of an option without one."""
    path = option_files(group).get(option)
    return {"name": option} if path is None else read_yaml(path.resolve())


def compose(overrides: Sequence[str], kind: type[C] = TrainConfig) -> C:  # type: ignore[assignment]
    """The configuration of one run; `kind` says which keys there are.

    Raises UserError for every mistake in the overrides or in a YAML file.
    """
    parsed = [parse(override) for override in overrides]
    for override in parsed:
        _check_override(override)
    chosen = [override.key_or_group for override in parsed if _is_group(override.key_or_group)]
    twice = next((group for group in chosen if chosen.count(group) > 1), None)
    if twice:
        raise UserError(f"{twice} is chosen {chosen.count(twice)} times; choose it once.")
    known = [field.name for field in dataclasses.fields(kind)]
    stray = next((group for group in chosen if _key_of(group) not in known), None)
    if stray:
        _check_command({stray: None}, known)
        raise UserError(f"unknown key {stray}{suggestion(stray, known)}")
    for override in parsed:
        _check_experiment(override, known)
    parsed.sort(key=lambda override: override.key_or_group == "debug")  # stable: +debug= comes last and wins
    # A space may have both `optimizer` and `optimizer.momentum`, which for Hydra are one node.
    of_space = [each for each in parsed if each.key_or_group.startswith("space.") and not each.is_delete()]
    settled = [text for override in parsed if override not in of_space for text in _settled(override)]
    plain = _compose_plain(settled, kind.CONF)
    for override in of_space:
        key = override.key_or_group.removeprefix("space.")
        plain["space"] = laid_over(plain.get("space", {}), key, override.value())
    if isinstance(plain.get("experiment"), dict) and "experiment" in chosen:  # beneath its group, as other groups do
        name = next(str(each.value()) for each in parsed if each.key_or_group == "experiment")
        raise UserError(f'conf/experiment/{name}.yaml must begin with "# @package _global_"; add that line.')
    _check_command(plain, known)
    check_no_group_left_out(plain, known, {group: REGISTRIES[group].values() for group in REGISTRIES if group in known})
    return from_mapping(kind, _with_groups(plain, kind))


def config_from_mapping(plain: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Plain values, as in a run's config.yaml, to the configuration.

    Raises UserError naming the key, and the file that they were read from where it is given.
    """
    try:
        return from_mapping(TrainConfig, _with_groups(plain, TrainConfig))
    except UserError as error:
        if file is None:
            raise
        raise UserError(f"{file}: {error}") from error


def config_to_mapping(config: TrainConfig) -> dict[str, Any]:
    """The inverse of `config_from_mapping`: plain values, every default spelled out."""
    plain = to_mapping(config)
    for group in REGISTRIES:
        plain[group] = {"name": type(getattr(config, group)).NAME, **plain[group]}
    return plain


def _with_groups(plain: Mapping[str, Any], kind: type[CommandConfig]) -> dict[str, Any]:
    """The values with a settings object in place of each group's that the command has."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    nested: dict[str, Any] = {}
    if "distributed" in fields:
        distributed = plain.get("distributed", {})
        if not isinstance(distributed, Mapping):
            raise UserError(
                f"distributed must be a mapping, got {shown(distributed)}; set distributed.timeout_s=300, say."
            )
        nested["distributed"] = from_mapping(DistributedSettings, distributed, "distributed")
    for group in REGISTRIES:
        if group in fields and (plain.get(group) is not None or fields[group].default is not None):
            nested[group] = _choose(group, plain.get(group))
    return {**plain, **nested}


def _choose(group: str, values: Any) -> Any:
    """The settings object of one group: the class registered under its `name`, built from the other keys."""
    registry = REGISTRIES[group]
    if not isinstance(values, Mapping):
        raise UserError(f"{group} must be one of {', '.join(registry)}, got {shown(values)}; write {group}=NAME.")
    if "name" not in values:
        known = ", ".join(registry)
        raise UserError(f"{group} has keys but no name; choose an option too: {group}=NAME, one of {known}.")
    name = str(values["name"])
    if name not in registry:
        raise UserError(f"{group}.name must be a registered name, got {name!r}{suggestion(name, registry)}")
    own = {key: value for key, value in values.items() if key != "name"}
    return from_mapping(registry[name], own, group, registry.values())


def _key_of(group: str) -> str:
    """The key that a group sets."""
    return "experiment" if group in APPENDED_GROUPS else group


def _is_group(key: str) -> bool:
    return key in REGISTRIES or key in APPENDED_GROUPS


def _check_override(override: Override) -> None:
    """Refuse a sweep without -m, a group option that does not exist, and one with a plus too many or too few."""
    text, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        raise UserError(f"{text!r} lists several values; add -m to run each of them, or quote the value.")
    if override.is_delete() or not _is_group(key):
        return
    value, options = override.value(), group_options(key)
    if not isinstance(value, str) or value not in options:
        raise UserError(f"unknown {key} {value!r}{suggestion(str(value), options)} --list shows them all.")
    check_own_option(key, value)
    if key in APPENDED_GROUPS and not override.is_add():
        raise UserError(f"{key} is chosen with a leading plus: write +{key}={value}.")
    if key in REGISTRIES and text.startswith("+"):
        raise UserError(f"{key} is chosen without a plus: write {key}={value}.")


def _check_experiment(override: Override, known: Sequence[str]) -> None:
    """Refuse an experiment of another command."""
    if override.key_or_group == "experiment" and not override.is_delete():
        name = str(override.value())
        for key in read_option("experiment", name):
            if key not in (*known, "defaults"):
                raise UserError(
                    f"experiment {name} is for another command: it sets {key}, which means nothing here; search_* are "
                    "for python -m crossbow_py.search."
                )


def _check_command(plain: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that only another command has."""
    for key in plain:
        if key not in known:
            others = [name for name in _COMMANDS if key in read_yaml(config_dir() / f"{name}.yaml")]
            if others or key in REGISTRIES:
                command = f"python -m crossbow_py.{(others or _COMMANDS)[0]}"
                raise UserError(f"unknown key {key}, which is for {command}{suggestion(key, known)}")


def _settled(override: Override) -> list[str]:
    """A value is set whether or not the option file spells its key out: the dataclasses judge the key, not the file."""
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete():
        return [text]
    if not _is_group(key):
        return ["++" + text.lstrip("+")]
    if str(override.value()) in option_files(key):
        return [text]
    return [f"~{key}", f"++{key}.name={override.value()}"]


def _compose_plain(overrides: list[str], conf: str) -> dict[str, Any]:
    own = own_config_dir()
    if own is not None:
        overrides = [*overrides, f"hydra.searchpath=[{quoted(f'file://{own}')}]"]
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = hydra.compose(conf, overrides=overrides)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (InterpolationResolutionError, GrammarParseError) as error:
        problem = one_line_of(error).rstrip(".")
        raise UserError(f"{problem}; write the value itself, or \\${{ where the text is meant.") from error
    except _COMPOSITION_ERRORS as error:
        raise UserError(f"{one_line_of(error).rstrip('.')}; --help explains the keys.") from error
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}
