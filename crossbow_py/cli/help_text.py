"""The texts of --help and --list, built from the settings classes and the option files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from crossbow_py.cli.config_files import config_dir, read_yaml
from crossbow_py.cli.configuration import (
    APPENDED_GROUPS,
    CommandConfig,
    Registry,
    group_options,
    options_of,
    read_option,
)
from crossbow_py.cli.flags import FLAGS
from crossbow_py.cli.launchers.words import GROUP as LAUNCHER
from crossbow_py.cli.launchers.words import LAUNCHERS
from crossbow_py.core.settings import allowed, written

_OF_HYDRA = (
    "  hydra/launcher=NAME and hydra.launcher.KEY=VALUE, with -m: who starts the jobs, for example joblib",
    "  hydra.run.dir=PATH, and with -m hydra.sweep.dir=PATH hydra.sweep.subdir=NAME: other names for folders",
)


@dataclass(frozen=True)
class Key:
    """A key of the command line, in words.

    Attributes:
        name: its dotted name.
        default: its default value, as it is written.
        meaning: one line.
        values: the values it may have.
        options: the options of its group that have it; none if all do, and for a key of no group.
    """

    name: str
    default: str
    meaning: str
    values: str
    options: tuple[str, ...] = ()


def help_text(kind: type[CommandConfig]) -> str:
    """Return the usage, then every key with its meaning and default, by group, for the configuration class `kind`."""
    lines = [kind.USAGE, "Further options:"]
    lines += [f"  {name:<18} {meaning}" for name, meaning in FLAGS.items() if name not in kind.USAGE]
    lines += [*_OF_HYDRA, "", "Keys and their defaults:"]
    lines += map(_key_line, command_keys(kind))
    for field in dataclasses.fields(kind):
        if field.name in kind.GROUPS:
            lines += ["", f"{field.name}=OPTION: {field.metadata['help']}"]
            lines += [f" OPTION is one of {', '.join(group_options(field.name, kind))}"]
            lines += map(_key_line, group_keys(field.name, kind))
    lines += ["", f"{LAUNCHER}=OPTION, with -m, and for a search without it: where jobs run, if not here"]
    lines += [f" OPTION is one of {', '.join(launcher_meanings())}"]
    return "\n".join([*lines, *map(_key_line, launcher_keys())])


def list_text(kind: type[CommandConfig]) -> str:
    """Return the experiments and the options of every group, each with one line of description."""
    groups = {f"+{group}" if group in APPENDED_GROUPS else group: option_meanings(group, kind)
              for group in (*APPENDED_GROUPS, *kind.GROUPS)}  # fmt: skip
    blocks = []
    for group, options in {**groups, LAUNCHER: launcher_meanings()}.items():
        width = max(map(len, options))
        lines = [f"  {name:<{width}}  {meaning}" for name, meaning in options.items()]
        blocks.append("\n".join([f"{group}=", *lines]))
    return "\n\n".join(blocks)


def option_meanings(group: str, kind: type[CommandConfig]) -> dict[str, str]:
    """Return the options of a group of a command, as `registry_meanings` does."""
    return registry_meanings(group, kind.GROUPS.get(group, {}))


def launcher_meanings() -> dict[str, str]:
    """Return our own launchers, as `registry_meanings` does."""
    return registry_meanings(LAUNCHER, LAUNCHERS)


def registry_meanings(group: str, registry: Registry) -> dict[str, str]:
    """Return the options of a group, each with its file's first comment, or the first docstring line of its class."""
    found = options_of(group, registry)
    for name in [name for name, comment in found.items() if not comment]:
        registered = registry.get(read_option(group, name).get("name", ""))
        found[name] = (registered.__doc__ or "").strip().split("\n")[0].rstrip(":") if registered else ""
    return found


def command_keys(kind: type[CommandConfig]) -> list[Key]:
    """Return the keys of a command that are in no group."""
    said = read_yaml(config_dir() / f"{kind.CONF}.yaml")
    keys = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            owner: type[Any] = type(field.default)
            keys += [_key(owner, each, f"{field.name}.") for each in dataclasses.fields(owner)]
        elif field.name not in kind.GROUPS:
            key, meaning = _key(kind, field), kind.MEANINGS.get(field.name)
            default = written(said[field.name]) if field.name in said else key.default
            keys.append(dataclasses.replace(key, default=default, meaning=meaning or key.meaning))
    return keys


def group_keys(group: str, kind: type[CommandConfig]) -> list[Key]:
    """Return every key of a group, once for each of its meanings and defaults, with the options that have it."""
    return registry_keys(group, kind.GROUPS[group])


def launcher_keys() -> list[Key]:
    """Return every key of our own launchers."""
    return registry_keys(LAUNCHER, LAUNCHERS)


def registry_keys(group: str, registry: Registry) -> list[Key]:
    """Return every key of the classes of a group, as `group_keys` does."""
    owners: dict[str, dict[Key, list[str]]] = {}
    for option, settings in registry.items():
        for field in dataclasses.fields(settings):
            key = _key(settings, field, f"{group}.")
            owners.setdefault(field.name, {}).setdefault(key, []).append(option)
    everyone = len(registry)
    return [
        key if len(options) == everyone else dataclasses.replace(key, options=tuple(options))
        for keys in owners.values()
        for key, options in keys.items()
    ]


def _key(owner: type[Any], field: dataclasses.Field[Any], prefix: str = "") -> Key:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Key(prefix + field.name, written(default), field.metadata.get("help", ""), allowed(owner, field.name))


def _key_line(key: Key) -> str:
    options = f" ({', '.join(key.options)})" if key.options else ""
    return f"  {key.name + '=' + key.default:<35} {key.meaning}{options}"
