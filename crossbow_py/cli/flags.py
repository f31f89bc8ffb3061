"""The flags of a command line, most of Hydra's among them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import suggestion

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
_SHORT = ("-m", "-c", "-p", "-i", "-cn", "-cd")
_NAMES = {*FLAGS, *_SHORT}
_SHOWN_BY_HYDRA = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True)
class Flags:
    """The flags of a command line.

    Attributes:
        multirun: whether to run every combination of values.
        list: whether to list the options of all groups.
        completion: the shell to write a completion script for.
        cfg: the part of the configuration to show: job, hydra or all.
        package: the key beneath which to show it.
        resolve: whether to show values in place of interpolations.
        info: what to show of Hydra.
        config_name: the file to begin with in place of the command's own.
        config_dir: a further folder of options.
    """

    multirun: bool = False
    list: bool = False
    completion: str | None = None
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False
    info: str | None = None
    config_name: str | None = None
    config_dir: str | None = None

    @property
    def of_every_job(self) -> Sequence[str]:
        """Return the flags that a single job of a multirun has too."""
        given = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [f"{name}={value}" for name, value in given.items() if value is not None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help explains the flags.")


def _parser() -> _Parser:
    parser = _Parser(prog="", add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--completion", nargs="?", const="")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=_SHOWN_BY_HYDRA)
    parser.add_argument("-cn", "--config-name")
    parser.add_argument("-cd", "--config-dir")
    return parser


def read_flags(arguments: Sequence[str], keys: Collection[str]) -> tuple[Flags, list[str]]:
    """Return the flags, and the words that are none; `keys` are those of the command. Raises UserError."""
    told = list(arguments)
    for place, each in enumerate(told[:-1]):
        if each in ("-i", "--info") and ("=" in told[place + 1] or told[place + 1].startswith(("+", "~"))):
            told[place] = "--info=all"  # whose value is left out before an override
    for each in told:  # of which argparse would read -precision=bf16 as -p recision=bf16
        name = each.partition("=")[0]
        if each.startswith("-") and name not in _NAMES:
            raise _unknown(each, keys)
    found, words = _parser().parse_known_args(told)
    flags = Flags(**vars(found))
    for name in ("package", "config_name", "config_dir"):
        if getattr(flags, name) == "":
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} takes a value, got nothing; write {flag} VALUE.")
    if sum((flags.multirun, flags.cfg is not None, flags.info is not None)) > 1:
        raise UserError("-m runs jobs, --cfg and --info show something instead; give one of them.")
    if flags.cfg is None and (flags.resolve or flags.package is not None):
        raise UserError("--resolve and --package say how --cfg shows a configuration; add --cfg job.")
    return flags, words


def _unknown(argument: str, keys: Collection[str]) -> UserError:
    name, _, value = argument.partition("=")
    key = name.lstrip("-").replace("-", "_")
    if key.split(".")[0] in keys:
        return UserError(f"unknown option {argument}; keys have no dashes: write {key}={value or 'VALUE'}.")
    return UserError(f"unknown option {argument}{suggestion(argument, FLAGS)}")
