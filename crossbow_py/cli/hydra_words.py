"""The words of a command line that set Hydra's own configuration: a launcher for a sweep, and the folders of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossbow_py.cli.overrides import as_override, parse, refused
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown

BASIC = "basic"  # the launcher that runs one job after another in this process
_OF_HYDRA = re.compile(r"[+~]{0,2}hydra(?=[./@=]|\Z)")
_OUTPUT_DIR = re.compile(r"\+{0,2}output_dir=")
_LAUNCHER = "hydra/launcher"
_FOLDERS = {"hydra.run.dir": "run_dir", "hydra.sweep.dir": "sweep_dir", "hydra.sweep.subdir": "sweep_subdir"}


@dataclass(frozen=True)
class HydraWords:
    """The words of Hydra's own configuration.

    Attributes:
        launcher: the launcher that starts the jobs of a sweep.
        settings: the words that set its keys.
        run_dir: the folder of one run, as it is written.
        sweep_dir: the folder that has a folder for every run of a sweep.
        sweep_subdir: the name of such a folder.
    """

    launcher: str = BASIC
    settings: tuple[str, ...] = ()
    run_dir: str | None = None
    sweep_dir: str | None = None
    sweep_subdir: str | None = None

    @property
    def of_launcher(self) -> list[str]:
        """Return the words that choose the launcher, and set its keys."""
        return [*([f"{_LAUNCHER}={as_override(self.launcher)}"] if self.launcher != BASIC else []), *self.settings]

    def check_one_run(self) -> None:
        """Raise UserError for what only a sweep has."""
        if self.launcher != BASIC or self.settings:
            word = f"{_LAUNCHER}={self.launcher}" if self.launcher != BASIC else self.settings[0]
            raise UserError(f"{shown(word)} is for the jobs of a sweep; add -m, also to start a single one.")
        if self.sweep_dir is not None or self.sweep_subdir is not None:
            raise UserError("hydra.sweep.dir and hydra.sweep.subdir are of a sweep; add -m, or write output_dir=PATH.")

    def with_run_dir(self, words: Sequence[str]) -> list[str]:
        """Return the words of one run with its folder, if hydra.run.dir names one. Raises UserError for two folders."""
        if self.run_dir is None:
            return list(words)
        _check_one_folder("hydra.run.dir", words)
        return [*words, f"output_dir={self.run_dir}"]

    def check_sweep(self, words: Sequence[str]) -> None:
        """Raise UserError for what a sweep does not have, and for a folder that is named twice."""
        if self.run_dir is not None:
            raise UserError("hydra.run.dir is the folder of one run; with -m write hydra.sweep.dir=PATH.")
        if self.settings and self.launcher == BASIC:
            word = shown(self.settings[0])
            raise UserError(f"{word} is for a launcher, and none is chosen; add {_LAUNCHER}=NAME, for example joblib.")
        if self.sweep_dir is not None:
            _check_one_folder("hydra.sweep.dir", words)


def split_hydra(words: Sequence[str]) -> tuple[HydraWords, list[str]]:
    """Return what the words of Hydra's own configuration ask for, and the other words.

    Raises UserError for a word of Hydra's that means nothing here.
    """
    given = [word for word in words if _OF_HYDRA.match(word)]
    found: dict[str, Any] = {"settings": ()}
    for word in given:
        key, value = _read(word)
        if key == _LAUNCHER:
            if "launcher" in found:
                raise UserError(f"{_LAUNCHER} is chosen twice; choose it once.")
            found["launcher"] = value
        elif key in _FOLDERS:
            found[_FOLDERS[key]] = value
        else:
            found["settings"] += (word,)
    return HydraWords(**found), [word for word in words if not _OF_HYDRA.match(word)]


def _read(word: str) -> tuple[str, str]:
    """Return the key of a word, and the value of one that a launcher has not."""
    override = parse(word, of_hydra=True)
    key = override.key_or_group
    if override.is_sweep_override():
        raise UserError(f"{shown(word)} lists several values, and Hydra's own configuration has one; give one.")
    if key == "hydra.launcher" or key.startswith("hydra.launcher."):
        return key, ""
    if key != _LAUNCHER and key not in _FOLDERS:
        raise refused(word)
    value = override.value()
    if override.is_delete() or not isinstance(value, str) or not value:
        raise UserError(f"{key} must be text, got {shown(word)}; write {key}=TEXT, or leave it out.")
    if key == _LAUNCHER and word.startswith("+"):
        raise UserError(f"{key} is chosen without a plus: write {key}={value}.")
    return key, word.partition("=")[2] if key == "hydra.run.dir" else value


def _check_one_folder(key: str, words: Sequence[str]) -> None:
    if any(map(_OUTPUT_DIR.match, words)):
        raise UserError(f"{key} and output_dir name the same folder; leave one of them out.")
