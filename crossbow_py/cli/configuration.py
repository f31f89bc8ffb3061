"""Composing a command's configuration: YAML groups and command-line words, by Hydra, into one frozen dataclass.

Hydra is called through its compose interface inside our own main, so it neither changes folders, nor logs, nor writes a
`.hydra` folder. An option of a group is a registered settings class, with its defaults, or a file. Choices are checked
first. Values are then set even if a file does not list the key, because the settings dataclasses know every key and
suggest one for a misspelled one. What a recipe sets beneath a group is for the option that it chooses, and goes with it
if the command line chooses another. No `DictConfig` leaves this file, and no command is known here: its configuration
class says what it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from crossbow_py.cli.commands import CONFIGURED, configuration_of
from crossbow_py.cli.config_files import (
    FILE_ERRORS,
    check_own_option,
    config_dir,
    config_file,
    first_comment,
    one_line_of,
    option_files,
    own_config_dirs,
    read_yaml,
)
from crossbow_py.cli.overrides import PARSING_ERRORS, as_override, escaped, parse
from crossbow_py.core.errors import UserError
from crossbow_py.core.other_names import ELSEWHERE, key_suggestion
from crossbow_py.core.settings import (
    check_no_group_left_out,
    defaults_of,
    from_mapping,
    shown,
    suggestion,
    to_mapping,
    written,
)

APPENDED_GROUPS = ("experiment", "debug")  # not in the defaults list: chosen with a leading +, in this order
COMPOSITION_ERRORS = (*PARSING_ERRORS, *FILE_ERRORS)
_stored: dict[tuple[str, str], type[Any]] = {}  # what Hydra's store of options has, by group and name
_HYDRAS_OWN = ("default", "basic", None)  # the options of Hydra's own groups, unless a file chooses others
Registry = Mapping[str, type[Any]]  # the settings class of each option of a group, by name


class CommandConfig(Protocol):
    """The interface of every command's configuration, a frozen dataclass of all the command's keys.

    Attributes:
        CONF: the YAML file with the default values.
        USAGE: the beginning of the command's --help.
        GROUPS: the groups whose options are chosen by GROUP=OPTION, each with its registry.
        MEANINGS: help of inherited keys that mean something else to this command.
        LAID_OVER: keys whose entries Hydra cannot merge, each with a function of (value, key beneath it, entry).
        TAKES_RECIPES: whether the command takes +experiment=NAME and +debug=NAME.
        NEEDS_FOLDER: whether the command writes a folder even if output_dir is not set.
    """

    CONF: ClassVar[str]
    USAGE: ClassVar[str]
    GROUPS: ClassVar[Mapping[str, Registry]]
    MEANINGS: ClassVar[Mapping[str, str]]
    LAID_OVER: ClassVar[Mapping[str, Callable[[Any, str, Any], Any]]]
    TAKES_RECIPES: ClassVar[bool]
    NEEDS_FOLDER: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def experiment(self) -> str:
        """Return the name of the folder in runs/ that results are written to."""

    @property
    def resume(self) -> str | Path | None:
        """Return the run or search to resume."""

    @property
    def output_dir(self) -> str | Path | None:
        """Return the folder to write to."""


C = TypeVar("C", bound=CommandConfig)


def group(help: str) -> Any:
    """Return a field that holds the settings object chosen for a group."""
    return dataclasses.field(metadata={"help": help})


def group_options(group: str, kind: type[CommandConfig]) -> dict[str, str]:
    """Return the options of a config group of a command, as `options_of` does."""
    return options_of(group, kind.GROUPS.get(group, {}))


def options_of(group: str, registry: Registry) -> dict[str, str]:
    """Return the options of a group, classes and files, each with the first line of its docstring or comment."""
    classes = {name: (settings.__doc__ or "").strip().split("\n")[0].rstrip(":") for name, settings in registry.items()}
    files = {name: first_comment(path) for name, path in option_files(group).items()}
    return dict(sorted({**classes, **files}.items()))


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the plain values in an option's file, or the name of a registered class."""
    path = option_files(group).get(option)
    return {"name": option} if path is None else read_yaml(path.resolve())


def compose(overrides: Sequence[str], kind: type[C], config_name: str | None = None) -> C:
    """Compose the configuration of one job; `kind` defines the keys.

    Args:
        overrides: the words of the command line.
        kind: the command's configuration class.
        config_name: the file to begin with; None for the command's own.

    Raises:
        UserError: for every mistake in the overrides or in a YAML file.
    """
    return from_plain(_composed(overrides, kind, config_name, resolve=True), kind)


def with_interpolations(overrides: Sequence[str], kind: type[CommandConfig], config_name: str | None) -> dict[str, Any]:
    """Return the plain values of one job as they are written, interpolations included. Raises UserError."""
    return _composed(overrides, kind, config_name, resolve=False)


def settled_words(overrides: Sequence[str], kind: type[CommandConfig]) -> list[str]:
    """Return overrides as Hydra takes them, without those that it cannot merge. Raises UserError."""
    return _settled_words([parse(override) for override in overrides], kind)


def _settled_words(parsed: Sequence[Override], kind: type[CommandConfig]) -> list[str]:
    ordered = sorted(parsed, key=lambda override: override.key_or_group == "debug")  # stable: +debug= wins
    return [_settled(each, kind) for each in ordered if not _is_laid_over(each, kind)]


def _composed(
    overrides: Sequence[str], kind: type[CommandConfig], config_name: str | None, resolve: bool
) -> dict[str, Any]:
    parsed = [parse(override) for override in overrides]
    for override in parsed:
        _check_override(override, kind)
    known = [field.name for field in dataclasses.fields(kind)]
    chosen = [override.key_or_group for override in parsed if _is_group(override.key_or_group, kind)]
    _check_chosen(chosen, known)
    for override in parsed:
        if override.key_or_group == "experiment" and not override.is_delete():
            _check_experiment(str(override.value()), known)
    _check_command([override.key_or_group for override in parsed], known)  # Hydra cannot compose what is no group here
    plain = _compose_plain(_settled_words(parsed, kind), kind, config_name, resolve)
    for override in parsed:
        if _is_laid_over(override, kind):
            owner = _owner_of(override, kind)
            key = override.key_or_group.removeprefix(f"{owner}.")
            plain[owner] = kind.LAID_OVER[owner](plain.get(owner, {}), key, override.value())
    if isinstance(plain.get("experiment"), dict) and "experiment" in chosen:  # beneath its group, as other groups do
        name = next(str(each.value()) for each in parsed if each.key_or_group == "experiment")
        raise UserError(f'conf/experiment/{name}.yaml must begin with "# @package _global_"; add that line.')
    _check_command(plain, known)
    for key in plain:
        if key not in known and (meant := key_suggestion(key, known)):
            raise UserError(f"unknown key {key}{meant}")
    check_no_group_left_out(plain, known, {group: registry.values() for group, registry in kind.GROUPS.items()})
    return plain


def from_plain(plain: Mapping[str, Any], kind: type[C]) -> C:
    """Make the configuration of plain values, with a settings object for every group. Raises UserError."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    nested: dict[str, Any] = {}
    for name, field in fields.items():
        if dataclasses.is_dataclass(field.default):
            owner: type[Any] = type(field.default)
            values = plain.get(name, {})
            if not isinstance(values, Mapping):
                example = next(f"{name}.{each.name}={written(each.default)}" for each in dataclasses.fields(owner))
                raise UserError(f"{name} must be a mapping, got {shown(values)}; set {example}, say.")
            nested[name] = from_mapping(owner, values, name)
    for name, registry in kind.GROUPS.items():
        if plain.get(name) is not None or fields[name].default is not None:
            nested[name] = chosen_settings(name, plain.get(name), registry)
    return from_mapping(kind, {**plain, **nested})


def to_plain(config: CommandConfig) -> dict[str, Any]:
    """Return the plain values of a configuration, with every default: the inverse of `from_plain`."""
    plain = to_mapping(config)
    for name in config.GROUPS:
        if (chosen := getattr(config, name)) is not None:
            plain[name] = {"name": chosen.NAME, **plain[name]}
    return plain


def options_for(key: str, kind: type[CommandConfig]) -> list[str]:
    """Return the options of a group that the command takes; none for a key that is no group."""
    if not _is_group(key, kind):
        return []
    options = group_options(key, kind)
    if key not in APPENDED_GROUPS:
        return list(options)
    return [name for name in options if _is_known(key, name, kind)]


def filled_in(
    texts: Mapping[str, str], jobs: Sequence[tuple[CommandConfig, Sequence[str]]], name: str
) -> list[dict[str, str]]:
    """Return the texts of hydra.sweep for each job, with its own keys and hydra.job in place of interpolations.

    Args:
        texts: by key, dir and subdir.
        jobs: each job's configuration and its overrides.
        name: what hydra.job.name is.

    Raises:
        UserError: for an interpolation of something else.
    """
    found: list[dict[str, str]] = []
    before = OmegaConf.create()
    for number, (config, overrides) in enumerate(jobs):
        job = {"num": number, "id": str(number), "name": name, "override_dirname": ",".join(sorted(overrides))}
        try:
            root = OmegaConf.create({**escaped(to_plain(config)), "hydra": {"job": job, "sweep": dict(texts)}})
            OmegaConf.copy_cache(before, root)  # so that ${now:...} is one moment for all
            found.append({key: str(OmegaConf.select(root, f"hydra.sweep.{key}")) for key in texts})
        except OmegaConfBaseException as error:
            given = " ".join(f"hydra.sweep.{key}={shown(text)}" for key, text in texts.items())
            raise UserError(
                f"{given}: {one_line_of(error).rstrip('.')}; keys of a run, hydra.job.num, hydra.job.override_dirname, "
                "hydra.job.name and now can be filled in."
            ) from error
        before = root
    return found


def chosen_settings(group: str, values: Any, registry: Registry) -> Any:
    """Return the settings object of one group: the class registered under its `name`, built from the other keys.

    Raises UserError.
    """
    if not isinstance(values, Mapping):
        got = "nothing" if values is None else shown(values)
        raise UserError(f"{group} must be one of {', '.join(registry)}, got {got}; write {group}=NAME.")
    if "name" not in values:
        known = ", ".join(registry)
        raise UserError(f"{group} has keys but no name; choose an option too: {group}=NAME, one of {known}.")
    name = str(values["name"])
    if name not in registry:
        raise UserError(f"{group}.name must be a registered name, got {name!r}{suggestion(name, registry)}")
    own = {key: value for key, value in values.items() if key != "name"}
    return from_mapping(registry[name], own, group, registry.values())


def _owner_of(override: Override, kind: type[CommandConfig]) -> str:
    """Return the key of `LAID_OVER` that the override is beneath; empty for none.

    A search space may have both `optimizer` and `optimizer.momentum`, which for Hydra are one node.
    """
    owner, dot, _ = override.key_or_group.partition(".")
    return owner if dot and owner in kind.LAID_OVER else ""


def _is_laid_over(override: Override, kind: type[CommandConfig]) -> bool:
    return bool(_owner_of(override, kind)) and not override.is_delete()


def _is_known(group: str, option: str, kind: type[CommandConfig]) -> bool:
    """Return whether an option is of keys and groups that the command has. One that cannot be read says so later."""
    try:
        plain = read_option(group, option)
    except UserError:
        return True
    chosen = [str(next(iter(each))).split("/")[-1] for each in plain.pop("defaults", ()) if isinstance(each, Mapping)]
    return {*plain, *chosen} <= {field.name for field in dataclasses.fields(kind)}


def _check_chosen(chosen: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a group that is chosen twice, or that the command does not have."""
    twice = next((group for group in chosen if chosen.count(group) > 1), None)
    if twice:
        raise UserError(f"{twice} is chosen {chosen.count(twice)} times; choose it once.")
    keys = {group: "experiment" if group in APPENDED_GROUPS else group for group in chosen}
    stray = next((group for group, key in keys.items() if key not in known), None)
    if stray:
        _check_command([stray], known)
        raise UserError(f"unknown key {stray}{suggestion(stray, known)}")


def _is_group(key: str, kind: type[CommandConfig]) -> bool:
    return key in kind.GROUPS or key in APPENDED_GROUPS


def _check_override(override: Override, kind: type[CommandConfig]) -> None:
    """Refuse a sweep without -m, an option that does not exist, and a wrong or missing plus."""
    text, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        raise UserError(f"{text!r} lists several values; add -m to run each of them, or quote the value.")
    if override.is_delete() or not _is_group(key, kind):
        return
    value, options = override.value(), group_options(key, kind)
    if not isinstance(value, str) or value not in options:
        is_recipe = isinstance(value, str) and value in option_files("experiment")
        meant = f"; it is a recipe: +experiment={value}." if is_recipe else suggestion(str(value), options)
        raise UserError(f"unknown {key} {value!r}{meant} --list shows them all.")
    check_own_option(key, value, kind.GROUPS.get(key, {}))
    check_plus(text, kind)


def check_plus(text: str, kind: type[CommandConfig]) -> None:
    """Refuse a word, which may list several options, with a wrong or missing plus."""
    override = parse(text)
    key = override.key_or_group
    if override.is_delete():
        return
    if key in APPENDED_GROUPS and not override.is_add():
        raise UserError(f"{key} is chosen with a leading plus: write +{text.lstrip('+')}.")
    if key in kind.GROUPS and text.startswith("+"):
        raise UserError(f"{key} is chosen without a plus: write {text.lstrip('+')}.")


def _check_experiment(name: str, known: Sequence[str]) -> None:
    plain = read_option("experiment", name)
    _check_no_hydra(f"experiment {name}", plain)
    for key in plain:
        if key not in (*known, "defaults") and (commands := _commands_with(key)):
            raise UserError(
                f"experiment {name} is for {commands}: it sets {key}, which means nothing here; choose "
                "another experiment, --list shows them."
            )


def _check_command(keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a key that only another command has."""
    for key in keys:
        if key not in known and (commands := _commands_with(key)):
            raise UserError(f"unknown key {key}, which is for {commands}{suggestion(key, known)}")


def _commands_with(key: str) -> str:
    """Return the first command that has the key; empty for none."""
    having = (name for name in CONFIGURED if key in configuration_of(name).__dataclass_fields__)
    return next((f"python -m crossbow_py.{name}" for name in having), "")


def _settled(override: Override, kind: type[CommandConfig]) -> str:
    """Return an override that sets its key even if the option does not list it: the dataclasses check keys."""
    text = str(override.input_line)
    if override.is_delete() or _is_group(override.key_or_group, kind):
        return text
    return "++" + text.lstrip("+")


@contextmanager
def searched(kind: type[CommandConfig], config_name: str | None) -> Iterator[tuple[str, list[str]]]:
    """Initialize Hydra on all options. Yields the file to begin with, and the word that adds the folders."""
    _store_classes(kind)
    main, name = (config_dir(), kind.CONF) if config_name is None else config_file(config_name, kind.CONF)
    others = [f"file://{folder}" for folder in (config_dir(), *own_config_dirs()) if folder != main]
    with hydra.initialize_config_dir(str(main), job_name=f"crossbow-{command_of(kind)}", version_base="1.3"):
        yield name, [f"hydra.searchpath={as_override(others)}"] if others else []


def _store_classes(kind: type[CommandConfig]) -> None:
    """Give Hydra the defaults of classes: an option for each registered one, and the command's keys as CONF_keys.

    A file of the same name comes before them.
    """
    classes = {(group, name): each for group, registry in kind.GROUPS.items() for name, each in registry.items()}
    for (group, name), settings in {**classes, ("", f"{kind.CONF}_keys"): kind}.items():
        if _stored.get((group, name)) is not settings:
            plain = {key: value for key, value in defaults_of(settings).items() if group or key not in kind.GROUPS}
            ConfigStore.instance().store(name, {**({"name": name} if group else {}), **plain}, group or None)
            _stored[group, name] = settings


def command_of(kind: type[CommandConfig]) -> str:
    """Return the name of the command that a configuration class belongs to, which is that of its folder."""
    return kind.__module__.split(".")[-2]


def _compose_plain(
    overrides: list[str], kind: type[CommandConfig], config_name: str | None, resolve: bool
) -> dict[str, Any]:
    if config_name is not None:
        folder, name = config_file(config_name, kind.CONF)
        _check_no_hydra(folder / f"{name}.yaml", read_yaml((folder / f"{name}.yaml").resolve()))
    try:
        with searched(kind, config_name) as (name, folders):
            composed = hydra.compose(name, overrides=[*overrides, *folders], return_hydra_config=True)
            choices = composed.hydra.runtime.choices
            with open_dict(composed):
                del composed["hydra"]
                _drop_of_recipes(composed, name, overrides, folders, kind)
        plain = OmegaConf.to_container(composed, resolve=resolve)
    except (InterpolationResolutionError, GrammarParseError) as error:
        problem = one_line_of(error).rstrip(".")
        raise UserError(f"{problem}; write the value itself, or \\${{ where the text is meant.") from error
    except (*COMPOSITION_ERRORS, TypeError) as error:  # the last for a name in a list
        _check_no_name_in_a_list(overrides, kind, config_name)
        raise UserError(f"{one_line_of(error).rstrip('.')}; --help explains the keys.") from error
    for group, option in choices.items():
        if group in kind.GROUPS and option is not None:
            check_own_option(group, option, kind.GROUPS[group])
        if str(group).startswith("hydra/") and option not in _HYDRAS_OWN:
            _refuse_choice("a file of the configuration", group, option)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _drop_of_recipes(
    composed: DictConfig, name: str, overrides: Sequence[str], folders: Sequence[str], kind: type[CommandConfig]
) -> None:
    """Take out what recipes set beneath the groups that the command line chooses.

    These groups are what they are without the recipes.
    """
    keys = {text: parse(text).key_or_group for text in overrides}
    chosen = [key for key in keys.values() if key in kind.GROUPS]
    if not chosen or not any(key in APPENDED_GROUPS for key in keys.values()):
        return
    own = [text for text, key in keys.items() if key.split(".")[0] in chosen]
    alone = hydra.compose(name, overrides=[*own, *folders])
    for group in chosen:
        composed[group] = alone.get(group)


def _refuse_choice(file: str, group: str, option: object) -> NoReturn:
    raise UserError(
        f"{file} chooses {group}={option}, which counts on the command line alone; take it out of the file, and write "
        "it there."
    )


def _check_no_name_in_a_list(overrides: Sequence[str], kind: type[CommandConfig], config_name: str | None) -> None:
    """Refuse a name beneath a key that is a list, which Hydra takes for the number of an entry."""
    keys = [parse(text).key_or_group for text in overrides]
    choices = [text for text, key in zip(overrides, keys, strict=True) if "." not in key]
    with suppress(*COMPOSITION_ERRORS), searched(kind, config_name) as (first, folders):
        composed = hydra.compose(first, overrides=[*choices, *folders])
        for key in keys:
            names = key.split(".")
            for depth, name in enumerate(names[1:], start=1):
                owner = ".".join(names[:depth])
                value = OmegaConf.select(composed, owner)
                if isinstance(value, ListConfig) and not name.isdecimal():
                    raise UserError(
                        f"{owner} is a list, which has no key {shown(name)}; write all of it, as in "
                        f"{owner}={written(OmegaConf.to_container(value))}{ELSEWHERE.get(owner, '.')}"
                    )


def _check_no_hydra(file: Path | str, keys: Mapping[str, Any]) -> None:
    """Refuse a file that sets Hydra's own configuration or a launcher, of which nothing would be seen."""
    defaults = keys.get("defaults")
    for each in defaults if isinstance(defaults, list) else ():
        for chosen, option in each.items() if isinstance(each, Mapping) else ():
            group = str(chosen).removeprefix("override ").strip().lstrip("/")
            if group.startswith("hydra/") and option not in _HYDRAS_OWN:
                _refuse_choice(str(file), group, option)
    if "launcher" in keys:
        raise UserError(
            f"{file} sets launcher, which counts on the command line alone; take it out of the file, and write "
            "launcher=NAME or launcher.KEY=VALUE there."
        )
    if "hydra" in keys:
        raise UserError(
            f"{file} sets hydra, which counts on the command line alone; take it out of the file, and write "
            "hydra/launcher=NAME or hydra.launcher.KEY=VALUE there."
        )
