"""Parsing the words of a command line, KEY=VALUE or GROUP=OPTION in Hydra's grammar, and expanding sweeps."""

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

# Numbers of thousands of digits and a thousand nested brackets raise the last two.
PARSING_ERRORS = (HydraException, ValueError, RecursionError)
_MOST_JOBS = 10_000
_MOST_VALUES = 2_000  # take a second; the grammar's time grows with the square
# As in Hydra's lexer: a quoted text, and an escaped character outside quotes.
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_NO_SYNTAX = re.compile(rf"{_QUOTED}|\\[\\()\[\]{{}}:=, \t]", re.DOTALL)
# The grammar has no ~ in a value, but shells leave it: bash in data.root=~/a and for unknown users, others in all keys.
_HOME = re.compile(r"([^=]*=)(~[\w./@%+-]*)")
_QUOTED_KEY = re.compile(rf"[{{,]\s*(?:{_QUOTED})\s*:", re.DOTALL)


def parse(text: str) -> Override:
    """Parse one word. Raises UserError for a word that sets no key and chooses no option."""
    _check_size(text)
    home = _HOME.fullmatch(text)
    try:
        override = OverridesParser.create().parse_override(f"{home[1]}'{home[2]}'" if home else text)
    except PARSING_ERRORS as error:
        remedy = "write key=value, and put special characters in quotes: key='\"a=b\"'."
        if _QUOTED_KEY.search(text):
            remedy = "keys in a mapping have no quotes: write {a b: 1}, and a backslash before a special character."
        raise UserError(f"cannot read {shown(text)}; {remedy}") from error
    _check_key(override)
    if not override.is_sweep_override():
        _check_names(text, override.value())
    return override


def expand_sweeps(words: Sequence[str]) -> list[tuple[list[str], str]]:
    """Return every combination of comma lists and ranges: each job's overrides, and its swept part as a folder name.

    Raises UserError for a word that cannot be swept, and for more than ten thousand combinations.
    """
    swept = [_sweep(word) for word in words]
    if math.prod(map(len, swept)) > _MOST_JOBS:
        raise UserError(f"a sweep runs at most {_MOST_JOBS} jobs, got more; list fewer values.")
    jobs = itertools.product(*swept)
    return [([text for text, _ in job], ",".join(name for _, name in job if name)) for job in jobs]


def quoted(text: str) -> str:
    """Return any text as a value in the grammar of overrides."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _sweep(text: str) -> list[tuple[str, str]]:
    """Return an override for each value of a sweep, with its name; an override with one value stays as it is."""
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
    """Return the value of a key that takes one text, as it is or in the grammar's quotes. Raises UserError."""
    if not text.startswith(("'", '"')):
        return text
    override = parse(f"{key}={text}")
    return text if override.is_sweep_override() else str(override.value())


def _check_size(text: str) -> None:
    """Refuse words that take the grammar minutes, or too many stack frames. Quoted text counts as one value."""
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
    """Refuse words of Hydra's own command lines that are no keys here."""
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
    """Refuse null as a key of a mapping, at any depth."""
    if isinstance(value, Mapping):
        if None in value:
            raise UserError(f"{shown(text)} has a mapping with the key null; give it a name, as in {{name: 1}}.")
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_names(text, item)
