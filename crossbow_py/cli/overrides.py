"""Parsing the words of a command line, KEY=VALUE or GROUP=OPTION in Hydra's grammar, and expanding sweeps."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from crossbow_py.cli.config_files import MOST_NESTED
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown

# Numbers of thousands of digits and a thousand nested brackets raise the last two.
PARSING_ERRORS = (HydraException, ValueError, RecursionError)
_MOST_JOBS = 2_000  # of which each takes a tenth of a second to compose
_MOST_VALUES = 2_000  # take a second; the grammar's time grows with the square
# As in Hydra's lexer: a quoted text, and an escaped character outside quotes.
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_NO_SYNTAX = re.compile(rf"{_QUOTED}|\\[\\()\[\]{{}}:=, \t]", re.DOTALL)
# The grammar has no ~ in a value, but shells leave it: bash in data.root=~/a and for unknown users, others in all keys.
_HOME = re.compile(r"([^=]*=)(~[\w./@%+-]*)")
_QUOTED_KEY = re.compile(rf"[{{,]\s*(?:{_QUOTED})\s*:", re.DOTALL)
# Text that needs no quotes, because it cannot be read as anything else.
_PLAIN_TEXT = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[A-Za-z_/][A-Za-z0-9_./]*", re.IGNORECASE)
# Hydra's interval, and what Optuna and Ray Tune call a range.
_RANGE = re.compile(r"\+{0,2}(?:space\.)?([\w.]+)=(.*?)(?:interval|uniform)\(([^,()]+),([^,()]+)\)+")
# What to do in place of the parts of Hydra's own configuration that people look for.
_INSTEAD = {
    "launcher": "hydra/launcher=NAME goes with -m, on the command line",
    "sweeper": "-m runs every combination, and python -m crossbow_py.search samples trials, compares and stops them",
}
_TAKEN = "-m, hydra/launcher, hydra.launcher.KEY, hydra.run.dir, hydra.sweep.dir and hydra.sweep.subdir are what counts"


def parse(text: str, of_hydra: bool = False) -> Override:
    """Parse one word. Raises UserError for a word that sets no key and chooses no option.

    A word `of_hydra` sets Hydra's own configuration, which any other word may not.
    """
    _check_size(text)
    home = _HOME.fullmatch(text)
    try:
        override = OverridesParser.create().parse_override(f"{home[1]}'{home[2]}'" if home else text)
    except PARSING_ERRORS as error:
        _check_no_range(text)
        remedy = "write key=value, and put special characters in quotes: key='\"a=b\"'."
        if _QUOTED_KEY.search(text):
            remedy = "keys in a mapping have no quotes: write {a b: 1}, and a backslash before a special character."
        raise UserError(f"cannot read {shown(text)}; {remedy}") from error
    _check_key(override, of_hydra)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        _check_no_range(text)
    if not override.is_sweep_override():
        _check_names(text, override.value())
    return override


def expand_sweeps(
    words: Sequence[str], options: Callable[[str], Collection[str]] = lambda _: ()
) -> list[tuple[list[str], str]]:
    """Return every combination of lists, ranges and globs: each job's overrides, and its swept part as a folder name.

    `options` are those of a group, among which a glob chooses; none for a key that is no group. Raises UserError for a
    word that cannot be swept, and for more than two thousand combinations.
    """
    swept = [_sweep(word, options) for word in words]
    if math.prod(map(len, swept)) > _MOST_JOBS:
        raise UserError(f"a sweep runs at most {_MOST_JOBS:,} jobs, got more; list fewer values.")
    jobs = itertools.product(*swept)
    return [([text for text, _ in job], ",".join(name for _, name in job if name)) for job in jobs]


def _sweep(text: str, options: Callable[[str], Collection[str]]) -> list[tuple[str, str]]:
    """Return an override for each value of a sweep, with its name; an override with one value stays as it is."""
    override = parse(text)
    if not override.is_sweep_override():
        return [(text, "")]
    glob: Any = override.value()
    try:
        if isinstance(glob, Glob):
            found = iter(_matching(text, glob, override.key_or_group, options))
        else:
            found = itertools.islice(override.sweep_string_iterator(), _MOST_JOBS + 1)
        values = [f"{override.get_key_element()}={value}" for value in found]
    except PARSING_ERRORS as error:
        raise UserError(f"cannot sweep {shown(text)}; list the values, as in seed=1,2,3 or seed=range(1,4).") from error
    if not values:
        raise UserError(f"{shown(text)} lists no value; list some, as in seed=1,2,3 or seed=range(1,4).")
    return [(value, value.lstrip("+").replace("/", "_")) for value in values]


def _matching(text: str, glob: Glob, group: str, options: Callable[[str], Collection[str]]) -> list[str]:
    """Return the options of a group that a glob matches. Raises UserError for none, and for a key that is no group."""
    known = list(options(group))
    if not known:
        raise UserError(f"cannot sweep {shown(text)}: glob() chooses options of a group, as in model=glob(resnet*).")
    found = glob.filter(known)
    if not found:
        raise UserError(f"{shown(text)} matches no option of {group}; --list shows them all.")
    return found


def read_text(key: str, text: str) -> str:
    """Return the value of a key that takes one text, as it is or in the grammar's quotes. Raises UserError."""
    if not text.startswith(("'", '"')):
        return text
    override = parse(f"{key}={text}")
    return text if override.is_sweep_override() else str(override.value())


def as_override(value: Any) -> str:
    """Return a plain value in the grammar of Hydra's command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    return value if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) else _quoted(value)


def _quoted(value: Any) -> str:
    """Return text in quotes, in which backslashes count only before a quote; a number as it is."""
    if not isinstance(value, str):
        return str(value)
    value = escaped(value)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value) + '"'


def escaped(value: Any) -> Any:
    """Return a plain value whose texts Hydra and OmegaConf take as they are.

    What looks like an interpolation is escaped, as it may come from the folder of somebody else's run.
    """
    if isinstance(value, Mapping):
        return {key: escaped(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(own) for own in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def refused(text: str, key: str) -> UserError:
    """Return the error for a word of Hydra's own configuration that means nothing here."""
    instead = _INSTEAD.get(key.replace("/", ".").removeprefix("hydra").removeprefix(".").split(".")[0], _TAKEN)
    return UserError(f"{shown(text)} sets what is Hydra's own, which is not read here: {instead}; leave it out.")


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


def _check_no_range(text: str) -> None:
    """Refuse a range to sample from."""
    if found := _RANGE.fullmatch(text):
        key, before, low, high = (each.rpartition("=")[2].strip() for each in found.groups())  # also start=1, end=2
        log = ",log:true" if "log" in before else ""
        space = f"space.{key}={{low:{low},high:{high}{log}}}"
        raise UserError(
            f"{shown(text)} is a range to sample from; write {shown(space)} for python -m crossbow_py.search, or list "
            "the values of a sweep."
        )


def _check_key(override: Override, of_hydra: bool) -> None:
    """Refuse words of Hydra's own command lines that are no keys here."""
    text, key = str(override.input_line), override.key_or_group
    if key.replace("/", ".").split(".")[0] == "hydra" and not of_hydra:
        raise refused(text, key)
    if not key:
        raise UserError(f"{shown(text)} sets no key of a run; write key=value with one of the keys --help shows.")
    if override.package is not None:
        raise UserError(f"{shown(text)} has an @, by which Hydra moves options elsewhere; write KEY=VALUE without it.")
    if "/" in key and not of_hydra:
        raise UserError(f"{shown(text)} has a / in its key, and no key has one; write KEY=VALUE, or GROUP=OPTION.")


def _check_names(text: str, value: Any) -> None:
    """Refuse null as a key of a mapping, at any depth."""
    if isinstance(value, Mapping):
        if None in value:
            raise UserError(f"{shown(text)} has a mapping with the key null; give it a name, as in {{name: 1}}.")
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_names(text, item)
