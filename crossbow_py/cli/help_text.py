"""The texts of --help and --list, built from the settings classes and the option files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossbow_py.cli.config_files import config_dir, read_yaml
from crossbow_py.cli.configuration import APPENDED_GROUPS, CommandConfig, Registry, group_options, options_of
from crossbow_py.cli.flags import FLAGS
from crossbow_py.cli.launchers.words import GROUP as LAUNCHER
from crossbow_py.cli.launchers.words import LAUNCHERS
from crossbow_py.core.settings import allowed, default_of, written

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
    """Return the usage, then every key once with its meaning and default, by group, for the class `kind`."""
    lines = [kind.USAGE, "Further options:"]
    lines += [f"  {name:<18} {meaning}" for name, meaning in FLAGS.items() if name not in kind.USAGE]
    lines += [*_OF_HYDRA, "", "Keys and their defaults:"]
    lines += map(_key_line, command_keys(kind))
    unused = getattr(kind, "UNUSED", ())
    for field in dataclasses.fields(kind):
        if field.name in kind.GROUPS and field.name not in unused:
            lines += ["", f"{field.name}=OPTION: {field.metadata['help']}"]
            lines += [f" OPTION is one of {', '.join(group_options(field.name, kind))}"]
            lines += _group_lines(group_keys(field.name, kind))
    lines += ["", f"{LAUNCHER}=OPTION, with -m, and for a search without it: where jobs run, if not here"]
    lines += [f" OPTION is one of {', '.join(options_of(LAUNCHER, LAUNCHERS))}"]
    return "\n".join([*lines, *_group_lines(launcher_keys())])


def list_text(kind: type[CommandConfig]) -> str:
    """Return the experiments and the options of every group, each with one line of description."""
    groups = {f"+{group}" if group in APPENDED_GROUPS else group: group_options(group, kind)
              for group in (*APPENDED_GROUPS, *kind.GROUPS)}  # fmt: skip
    blocks = []
    for group, options in {**groups, LAUNCHER: options_of(LAUNCHER, LAUNCHERS)}.items():
        width = max(map(len, options))
        lines = [f"  {name:<{width}}  {meaning}" for name, meaning in options.items()]
        blocks.append("\n".join([f"{group}=", *lines]))
    return "\n\n".join(blocks)


def command_keys(kind: type[CommandConfig]) -> list[Key]:
    """Return the keys of a command that are in no group, without those that mean nothing to it."""
    said = read_yaml(config_dir() / f"{kind.CONF}.yaml")
    keys = []
    for field in dataclasses.fields(kind):
        if field.name in getattr(kind, "UNUSED", ()):
            continue
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
    default, meaning = written(default_of(field)), field.metadata.get("help", "")
    return Key(prefix + field.name, default, meaning, allowed(owner, field.name))


def _group_lines(keys: Sequence[Key]) -> list[str]:
    """Return a line for every key of a group: its meanings, with the options that have it, and their other defaults."""
    found: dict[str, list[Key]] = {}
    for key in keys:
        found.setdefault(key.name, []).append(key)
    return [_key_line(dataclasses.replace(same[0], meaning=_meanings(same))) for same in found.values()]


def _meanings(same: Sequence[Key]) -> str:
    """Return the meanings of one key, as `meaning (sgd; adamw: 0.001)`, where the first default is the key's own."""
    options: dict[str, list[str]] = {}
    for key in same:
        other = f": {key.default}" if key.default != same[0].default else ""
        options.setdefault(key.meaning, []).append(", ".join(key.options) + other)
    texts = (f"{meaning} ({'; '.join(names)})" if any(names) else meaning for meaning, names in options.items())
    return "; ".join(texts)


def _key_line(key: Key) -> str:
    return f"  {key.name + '=' + key.default:<35} {key.meaning}"
