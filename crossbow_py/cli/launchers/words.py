"""The words of a command line that choose a launcher of our own: `launcher=NAME` and `launcher.KEY=VALUE`.

They say where a job runs, and are no part of its configuration: a run may go on anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from crossbow_py.cli.config_files import check_own_option, option_files
from crossbow_py.cli.configuration import chosen_settings, read_option
from crossbow_py.cli.hydra_words import BASIC, PACKAGES
from crossbow_py.cli.launchers.placement import RayLauncher
from crossbow_py.cli.overrides import parse
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown, suggestion

GROUP = "launcher"
LAUNCHERS: Mapping[str, type[RayLauncher]] = {RayLauncher.NAME: RayLauncher}

_OF_LAUNCHER = re.compile(rf"[+~]{{0,2}}{GROUP}(?=[.@/=]|\Z)")


def split_launcher(words: Sequence[str]) -> tuple[RayLauncher | None, list[str]]:
    """Return the launcher that words choose, None for no such words, and the other words. Raises UserError."""
    given = [word for word in words if _OF_LAUNCHER.match(word)]
    own = [word for word in words if not _OF_LAUNCHER.match(word)]
    if not given:
        return None, own
    option: str | None = None
    values: dict[str, Any] = {}
    for word in given:
        key, value = _read(word)
        if key != GROUP:
            values[key.removeprefix(f"{GROUP}.")] = value
        elif option is not None:
            raise UserError(f"{GROUP} is chosen twice; choose it once.")
        else:
            option = _known_option(value)
    if option is None:
        raise UserError(f"{shown(given[0])} is for a launcher, and none is chosen; add {GROUP}={RayLauncher.NAME}.")
    launcher: RayLauncher = chosen_settings(GROUP, {**read_option(GROUP, option), **values}, LAUNCHERS)
    return launcher, own


def _read(word: str) -> tuple[str, Any]:
    override = parse(word)
    key = override.key_or_group
    if override.is_sweep_override():
        raise UserError(f"{shown(word)} lists several values, and one launcher starts all jobs; give one.")
    if override.is_delete():
        raise UserError(f"{shown(word)} takes a launcher away, and only the command line chooses one; leave it out.")
    if key == GROUP and word.startswith("+"):
        raise UserError(f"{key} is chosen without a plus: write {key}={override.value()}.")
    return key, override.value()


def _known_option(value: Any) -> str:
    known = [*LAUNCHERS, *option_files(GROUP)]
    if value in (BASIC, *PACKAGES) and value not in known:
        raise UserError(f"{GROUP}={value} is a launcher of Hydra; write hydra/{GROUP}={value}.")
    if not isinstance(value, str) or value not in known:
        raise UserError(f"unknown {GROUP} {shown(value)}{suggestion(str(value), set(known))}")
    check_own_option(GROUP, value, LAUNCHERS)
    return value
