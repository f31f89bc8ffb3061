"""Grids of training runs as data: cells with their overrides, and what identifies one that has been run.

A cell is one setting of the command line, trained once for every seed. Where its records lie says what it was run
with, so that a changed setting is another cell and an unchanged one is not run again.

A question's grids are in its `grids.yaml`: `grids` by name, with the fields of `Grid` and, for all of its cells,
`common` overrides, a `program` and `parts`. `cells` is a list of mappings from names to overrides, of which later ones
replace those before, and of sides: a `side` that names begin with, `common` and `program` for `of`, its cells. `$NAME`
is one of the `fragments`, of this file or of fragments.yaml; `sets` hold what several grids refer to.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import yaml

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.train.config import TrainConfig, config_to_mapping
from experiments.bench.results import EXPERIMENTS

FILE = "grids.yaml"
_FRAGMENTS = Path(__file__).with_name("fragments.yaml")
TRAIN = "crossbow_py.train"
PARTS = "experiments.grids.parts"
_OF_ONE_RUN = ("experiment", "seed", "output_dir", "resume")


@dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
        name: unique in its grid; that of its row.
        overrides: of `python -m crossbow_py.train`, without seed, output_dir and resume.
        side: what pictures and tables sort it by; no part of what is run.
        program: what `python -m` runs; one other than `train` is given the number of parts first, and writes the
            records of a run as `train` does.
        parts: evaluations an epoch; more than one has `train` stop and go on for each of them.
    """

    name: str
    overrides: tuple[str, ...]
    side: str | None = None
    program: str = TRAIN
    parts: int = 1

    @property
    def key(self) -> str:
        """The same for all that is run alike, whatever it is called: by what the overrides come to, with recipes.

        Settings that are what they are when nothing is said are left out, so that a key that a later version adds makes
        no other cell.
        """
        identity = json.dumps([self.program, self.parts, said_of(self.overrides)], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        """Name of the folder of its runs: the key, with its name for people."""
        return f"{re.sub(r'[^A-Za-z0-9.]+', '_', self.name).strip('_')}-{self.key}"

    @property
    def settings(self) -> str:
        """All that the overrides come to, whatever was said, as words `key=value`; of one run alone, nothing."""
        return settings_of(self.overrides)

    def is_of(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is of a run of this cell; keys newer than the record must have their default."""
        alike = (record["program"], record["parts"]) == (self.program, self.parts)
        then, now = (dict(_pair(word) for word in words.split()) for words in (record["settings"], self.settings))
        said = {_pair(word)[0] for word in _words(said_of(self.overrides))} & now.keys()
        return alike and {**now, **then} == now and not said - then.keys()

    def command(self, seed: int, output_dir: str) -> list[str]:
        """The words after `python -m` that run it, or go on with it."""
        words = [*self.overrides, f"seed={seed}", f"output_dir='{output_dir}'", "resume=auto"]
        if self.program == TRAIN and self.parts == 1:
            return [TRAIN, *words]
        return [PARTS if self.program == TRAIN else self.program, str(self.parts), *words]


@dataclass(frozen=True)
class Grid:
    """Cells that are compared with each other.

    Attributes:
        name: of the results file.
        title: of the picture.
        cells: in the order of the table.
        seeds: when no others are asked for.
        targets: test accuracies; tables say when they were reached.
        reference: the cell that others are compared with, seed by seed.
        shown_after: epochs after which tables show accuracies too, those of an evaluation each.
        alone: whether times matter, so that cells run one at a time.
        curves: whether results keep all evaluations; if not, those at which targets were reached, and the last.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    targets: tuple[float, ...] = ()
    reference: str | None = None
    shown_after: tuple[float, ...] = ()
    alone: bool = False
    curves: bool = True

    def with_overrides(self, extra: Sequence[str]) -> Grid:
        """The same cells, each with more overrides, which replace those of the same key."""
        return replace(self, cells=tuple(replace(cell, overrides=merged(cell.overrides, extra)) for cell in self.cells))


@cache
def settings_of(overrides: tuple[str, ...]) -> str:
    """All settings that a command comes to; of what is no command of `train`, its words."""
    if (config := _composed(overrides)) is None:
        return " ".join(sorted(overrides))
    kept = {key: value for key, value in config_to_mapping(config).items() if key not in _OF_ONE_RUN}
    return " ".join(_words(kept))


def _words(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _words(value, f"{path}{key}.")
        else:
            yield f"{path}{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


@cache
def said_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a command that are not what they are when nothing is said, as plain values; or its words."""
    if (config := _composed(overrides)) is None:
        return {"words": sorted(overrides)}
    said = _said(config)
    for group in TrainConfig.GROUPS:
        if (chosen := getattr(config, group, None)) is not None:
            said[group] = {"name": type(chosen).NAME, **_said(chosen)}
    return said


@cache
def _composed(overrides: tuple[str, ...]) -> TrainConfig | None:
    try:
        return compose(list(overrides), TrainConfig)
    except UserError:
        return None


def _said(settings: Any) -> dict[str, Any]:
    own = [each for each in fields(settings) if each.name not in TrainConfig.GROUPS]
    values = {each.name: getattr(settings, each.name) for each in own if getattr(settings, each.name) != each.default}
    kept = {key: _said(value) if is_dataclass(value) else value for key, value in values.items()}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]  # tuples become lists


def read_grids(question: str) -> dict[str, Grid]:
    """The grids of a question by name. Raises ValueError for a question that has none."""
    known = sorted(path.parent.name for path in EXPERIMENTS.glob(f"*/{FILE}"))
    if question not in known:
        raise ValueError(f"QUESTION must be one of {', '.join(known)}, got {question!r}.")
    given = yaml.safe_load((EXPERIMENTS / question / FILE).read_text())
    fragments: dict[str, str] = {}
    for name, words in {**yaml.safe_load(_FRAGMENTS.read_text()), **given.get("fragments", {})}.items():
        fragments[name] = Template(words).substitute(fragments)
    return {name: _grid(name, settings, fragments) for name, settings in given["grids"].items()}


def _grid(name: str, settings: Mapping[str, Any], fragments: Mapping[str, str]) -> Grid:
    shared = {key: settings[key] for key in ("common", "program", "parts") if key in settings}
    own: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
        if key not in (*shared, "cells")
    }
    found: dict[str, Cell] = {}
    for group in settings["cells"]:
        found |= {cell.name: cell for cell in _cells(group if "of" in group else {"of": group}, shared, fragments)}
    return Grid(name, cells=tuple(found.values()), **own)


def _cells(group: Mapping[str, Any], shared: Mapping[str, Any], fragments: Mapping[str, str]) -> Iterator[Cell]:
    side = group.get("side")
    for name, own in group["of"].items():
        words = [Template(text).substitute(fragments).split()
                 for text in (shared.get("common", ""), group.get("common", ""), own)]  # fmt: skip
        yield Cell(
            name if side is None else f"{side}, {name}", merged(*words), side,
            program=group.get("program", shared.get("program", TRAIN)), parts=shared.get("parts", 1),
        )  # fmt: skip


def merged(*lists: Sequence[str]) -> tuple[str, ...]:
    """All overrides, in the place of the first of their key with the value of the last."""
    found: dict[str, str] = {}
    for override in (override for overrides in lists for override in overrides):
        found[override.partition("=")[0]] = override
    return tuple(found.values())


def chosen(grid: Grid, pattern: str) -> tuple[Cell, ...]:
    """The cells whose names match, as file names do: `sma*`.

    Raises:
        ValueError: none does.
    """
    found = tuple(cell for cell in grid.cells if fnmatch.fnmatchcase(cell.name, pattern))
    if not found:
        names = "; ".join(cell.name for cell in grid.cells)
        raise ValueError(f"no cell of {grid.name} matches {pattern!r}; there are {names}.")
    return found


def in_turns(cells: Sequence[Cell], seeds: Sequence[int]) -> list[tuple[Cell, int]]:
    """Every cell with the first seed, then in the opposite order with the next, and so on.

    A machine that slows down meanwhile slows all of them alike, and a grid that is cut short has all of its rows.
    """
    return [(cell, seed) for place, seed in enumerate(seeds) for cell in (cells[::-1] if place % 2 else cells)]
