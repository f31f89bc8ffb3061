"""The words of a command line, KEY=VALUE or GROUP=OPTION in Hydra's grammar: read, refused or swept."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from crossbow_py.cli.config_files import MOST_NESTED
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown

# Numbers of thousands of digits and brackets nested a thousand deep end in the last two.
PARSING_ERRORS = (HydraException, ValueError, RecursionError)
_MOST_JOBS = 10_000
_MOST_VALUES = 2_000  # the grammar's time grows with their square: a second for so many
# As Hydra's lexer has them: a text in quotes, and an escaped character outside of such.
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_NO_SYNTAX = re.compile(rf"{_QUOTED}|\\[\\()\[\]{{}}:=, \t]", re.DOTALL)
# The grammar has no ~ in a value. Shells leave it there: bash for data.root=~/a and unknown users, others for all keys.
_HOME = re.compile(r"([^=]*=)(~[\w./@%+-]*)")
_QUOTED_KEY = re.compile(rf"[{{,]\s*(?:{_QUOTED})\s*:", re.DOTALL)


def parse(text: str) -> Override:
    """One word. Raises UserError for what sets no key and chooses no option of any command."""
    _check_size(text)
    home = _HOME.fullmatch(text)
    try:
        override = OverridesParser.create().parse_override(f"{home[1]}'{home[2]}'" if home else text)
    except PARSING_ERRORS as error:
        raise UserError(f"cannot read {shown(text)}; {_remedy(text)}") from error
    _check_key(override)
    if not override.is_sweep_override():
        _check_names(text, override.value())
    return override


def expand_sweeps(words: Sequence[str]) -> list[tuple[list[str], str]]:
    """Every combination of comma lists and ranges: the overrides of each job, and its swept part as a folder name.

    Raises UserError for what cannot be swept, and for more than ten thousand combinations.
    """
    swept = [_sweep(word) for word in words]
    if math.prod(map(len, swept)) > _MOST_JOBS:
        raise UserError(f"a sweep runs at most {_MOST_JOBS} jobs, got more; list fewer values.")
    jobs = itertools.product(*swept)
    return [([text for text, _ in job], ",".join(name for _, name in job if name)) for job in jobs]


def quoted(text: str) -> str:
    """Any text as a value in the grammar of overrides."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _sweep(text: str) -> list[tuple[str, str]]:
    """The single values of an override with several, each with its name; an override with one value as it is."""
    override = parse(text)
    if not override.is_sweep_override():
        return [(text, "")]
    try:
        found = itertools.islice(override.sweep_string_iterator(), _MOST_JOBS + 1)
        values = [f"{override.get_key_element()}={value}" for value in found]
    except PARSING_ERRORS as error:
        raise UserError(f"cannot sweep {shown(text)}; list the values, as in seed=1,2,3 or seed=range(1,4).") from error
    return [(value, value.lstrip("+").replace("/", "_")) for value in values]


def read_text(key: str, text: str) -> str:
    """The value of a key that takes one text, as it is or in the grammar's quotes. Raises UserError."""
    if not text.startswith(("'", '"')):
        return text
    override = parse(f"{key}={text}")
    return text if override.is_sweep_override() else str(override.value())


def _remedy(text: str) -> str:
    if _QUOTED_KEY.search(text):
        return "keys in a mapping have no quotes: write {a b: 1}, and a backslash before a special character."
    return "write key=value, and put special characters in quotes: key='\"a=b\"'."


def _check_size(text: str) -> None:
    """Refuse what the grammar takes minutes for, or too many frames. Quoted text is one value, whatever is in it."""
    written = text
    text = _NO_SYNTAX.sub(lambda found: found[0] if "${" in found[0] else "", text)  # interpolations have a grammar
    if text.count(",") >= _MOST_VALUES:
        raise UserError(f"{shown(written)} lists more than {_MOST_VALUES:,} values; give fewer.")
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MOST_NESTED:
        raise UserError(f"{shown(written)} is nested more than {MOST_NESTED} deep; write fewer brackets.")


def _check_key(override: Override) -> None:
    """Refuse what Hydra's own command lines may have in place of a key."""
    text, key = override.input_line, override.key_or_group
    if key.replace("/", ".").split(".")[0] == "hydra":
        raise UserError(
            f"{shown(text)} is an option of Hydra, which only reads the configuration here; leave it out: -m runs "
            "sweeps, and output_dir=PATH sets the folder."
        )
    if not key:
        raise UserError(f"{shown(text)} sets no key of a run; write key=value with one of the keys --help shows.")
    if override.package is not None:
        raise UserError(f"{shown(text)} has an @, by which Hydra moves options elsewhere; write KEY=VALUE without it.")
    if "/" in key:
        raise UserError(f"{shown(text)} has a / in its key, and no key has one; write KEY=VALUE, or GROUP=OPTION.")


def _check_names(text: str, value: Any) -> None:
    """Refuse null as a key of a mapping, in whatever nesting."""
    if isinstance(value, Mapping):
        if None in value:
            raise UserError(f"{shown(text)} has a mapping with the key null; give it a name, as in {{name: 1}}.")
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_names(text, item)
