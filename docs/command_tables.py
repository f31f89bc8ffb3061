"""A hook of mkdocs: fills in the tables of reference/commands.md, which the repository does not keep.

The page says where a table goes by `<!-- keys:PART -->`. The tables have the keys of every command and group, and the
options of every group. They are made of the settings classes, as `--help` and `--list` are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crossbow_py.check.config import CheckConfig
from crossbow_py.cli.configuration import APPENDED_GROUPS, group_options
from crossbow_py.cli.help_text import Key, command_keys, group_keys, launcher_keys
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.many.config import ManyConfig
from crossbow_py.predict.config import PredictConfig
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig

_PLACE = re.compile(r"^<!-- keys:(\S+) -->$", re.MULTILINE)
_LARGEST = 2**63 - 1
_FEW = 2  # options that lack a key: shorter to name than those that have it


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its tables. Called by mkdocs for every page of the site."""
    return _PLACE.sub(lambda place: table(place[1]), markdown)


def table(part: str) -> str:
    """Return one table. Raises ValueError for an unknown part.

    Args:
        part: a command (for `search`, `many` and `estimate` only the keys that differ from those of `train`), a group,
            `launcher`, which is part of no configuration, or `options/GROUP`.
    """
    tables: dict[str, Callable[[], str]] = {
        "train": lambda: _key_table(command_keys(TrainConfig)),
        "estimate": lambda: _key_table(_own(command_keys(EstimateConfig))),
        "many": lambda: _key_table(_own(command_keys(ManyConfig))),
        "search": lambda: _key_table(_own(command_keys(SearchConfig))),
        "predict": lambda: _key_table(command_keys(PredictConfig)),
        "check": lambda: _key_table(command_keys(CheckConfig)),
        "launcher": lambda: _key_table(launcher_keys()),
        **{group: partial(_group_table, group) for group in TrainConfig.GROUPS},
        **{f"options/{group}": partial(_option_table, group) for group in (*APPENDED_GROUPS, *TrainConfig.GROUPS)},
    }
    if part not in tables:
        raise ValueError(f"keys:{part} is none of {', '.join(tables)}.")
    return tables[part]()


def _own(keys: Sequence[Key]) -> list[Key]:
    """Return the keys that training lacks, or has with another meaning or default."""
    of_training = command_keys(TrainConfig)
    return [key for key in keys if key not in of_training]


def _group_table(group: str) -> str:
    return _key_table(group_keys(group, TrainConfig), group)


def _option_table(group: str) -> str:
    options = group_options(group, TrainConfig)
    return _rows(["option", "what it is"], [[f"`{name}`", said] for name, said in options.items()])


def _key_table(keys: Sequence[Key], group: str | None = None) -> str:
    """A row a key; with a group, whose options may differ in their keys, a column on which have it."""
    header = ["key", "default", "may be", "meaning"]
    rows = [
        [f"`{key.name}`", f"`{key.default}`" if key.default else "", _shorter(key.values), key.meaning] for key in keys
    ]
    if group is not None and any(key.options for key in keys):
        header = [*header, f"with `{group}=`"]
        rows = [[*row, _options(key, group)] for row, key in zip(rows, keys, strict=True)]
    return _rows(header, rows)


def _options(key: Key, group: str) -> str:
    missing = [option for option in TrainConfig.GROUPS[group] if option not in key.options]
    if not key.options:
        return "all"
    if len(missing) <= _FEW < len(key.options) and _has_one_row(key, group):
        return f"all but {', '.join(missing)}"
    return ", ".join(key.options)


def _has_one_row(key: Key, group: str) -> bool:
    """Return whether the options that are not named lack the key, and not only have another default of it."""
    return sum(each.name == key.name for each in group_keys(group, TrainConfig)) == 1


def _shorter(values: str) -> str:
    return values.replace(f"{_LARGEST:,}", "2⁶³ − 1")


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(cell: str) -> str:
    """Escape the text of a cell: outside of backticks nothing is markup."""
    parts = cell.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|") for part in parts[::2]]
    return "`".join(parts)
