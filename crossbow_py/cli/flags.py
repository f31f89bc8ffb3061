"""The flags of a command line, most of Hydra's among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown, suggestion

FLAGS = {
    "--help": "every key, with its meaning",
    "--list": "the experiments and the options of every group",
    "--completion": "completion for a shell: bash, zsh or fish",
    "--multirun": "run every combination of values that are separated by commas",
    "--cfg": "show the configuration instead of running: job, hydra or all",
    "--package": "show only what is beneath this key, with --cfg",
    "--resolve": "show values in place of interpolations, with --cfg",
    "--info": "what Hydra knows: all, config, defaults, defaults-tree, plugins or searchpath",
    "--config-name": "begin with this file of a folder of options",
    "--config-dir": "a further folder of options, as conf is one",
}
SHORT = {
    "-h": "--help", "-m": "--multirun", "-c": "--cfg", "-p": "--package", "-i": "--info", "-cn": "--config-name",
    "-cd": "--config-dir",
}  # fmt: skip
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
_TAKE_A_VALUE = ("--completion", "--package", "--config-name", "--config-dir", *_CHOICES)

Given = tuple[str, str | None]  # a flag by its long name, or as it is if there is none of that name; and its value


@dataclass(frozen=True)
class Flags:
    """What the flags of a command line ask for.

    Attributes:
        multirun: whether to run every combination of values.
        listing: whether to list the options of all groups.
        completion: the shell to write a completion script for.
        cfg: the part of the configuration to show: job, hydra or all.
        package: the key beneath which to show it.
        resolve: whether to show values in place of interpolations.
        info: what to show of Hydra.
        config_name: the file to begin with in place of the command's own.
        config_dir: a further folder of options.
    """

    multirun: bool = False
    listing: bool = False
    completion: str | None = None
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False
    info: str | None = None
    config_name: str | None = None
    config_dir: str | None = None

    @property
    def of_every_job(self) -> list[str]:
        """Return the flags that a single job of a multirun has too."""
        given = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [f"{name}={value}" for name, value in given.items() if value is not None]


def split_flags(arguments: Sequence[str]) -> tuple[list[Given], list[str]]:
    """Return the flags, and the words that are none."""
    flags: list[Given] = []
    words: list[str] = []
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if not argument.startswith("-"):
            words.append(argument)
            continue
        written, equals, text = argument.partition("=")
        name, value = SHORT.get(written, written), text if equals else None
        if name in _TAKE_A_VALUE and not equals and rest and _is_value(name, rest[-1]):
            value = rest.pop()
        flags.append((name, value) if name in FLAGS else (argument, None))
    return flags, words


def read_flags(given: Sequence[Given], keys: Collection[str]) -> Flags:
    """Return what the flags ask for; `keys` are those of the command. Raises UserError."""
    found = {name: _value(name, value, keys) for name, value in given}
    flags = Flags(
        multirun="--multirun" in found,
        listing="--list" in found,
        completion=found.get("--completion"),
        cfg=found.get("--cfg"),
        package=found.get("--package"),
        resolve="--resolve" in found,
        info=found.get("--info"),
        config_name=found.get("--config-name"),
        config_dir=found.get("--config-dir"),
    )
    if sum((flags.multirun, flags.cfg is not None, flags.info is not None)) > 1:
        raise UserError("-m runs jobs, --cfg and --info show something instead; give one of them.")
    if flags.cfg is None and (flags.resolve or flags.package is not None):
        name = "--resolve" if flags.resolve else "--package"
        raise UserError(f"{name} says how --cfg shows a configuration; add --cfg job, or leave it out.")
    return flags


def _is_value(name: str, word: str) -> bool:
    """Return whether a word behind a flag is its value. That of --info may be left out."""
    return not word.startswith("-") and (name != "--info" or not ("=" in word or word.startswith(("+", "~"))))


def _value(name: str, value: str | None, keys: Collection[str]) -> str:
    if name not in FLAGS:
        raise _unknown(name, keys)
    if name not in _TAKE_A_VALUE:
        if value is not None:
            raise UserError(f"{name} takes no value, got {shown(value)}; leave the value out.")
        return ""
    value = "all" if value is None and name == "--info" else value or ""
    if name in _CHOICES and value not in _CHOICES[name]:
        got = shown(value) if value else "nothing"
        choices = _CHOICES[name]
        raise UserError(f"{name} takes one of {', '.join(choices)}, got {got}; write {name} {choices[0]}.")
    if not value and name != "--completion":
        raise UserError(f"{name} takes a value, got nothing; write {name} VALUE.")
    return value


def _unknown(argument: str, keys: Collection[str]) -> UserError:
    name, _, value = argument.partition("=")
    key = name.lstrip("-").replace("-", "_")
    if key.split(".")[0] in keys:
        return UserError(f"unknown option {argument}; keys have no dashes: write {key}={value or 'VALUE'}.")
    return UserError(f"unknown option {argument}{suggestion(argument, (*FLAGS, *SHORT))}")
