"""Settings: frozen dataclasses beside their owner, checked in the same way from the command line and from Python.

A settings class names its config group in `GROUP`, declares each field with `setting(...)` and calls `check(self)` in
`__post_init__`. `from_mapping` builds one from parsed YAML. Every mistake is one `UserError` sentence.

Pydantic's dataclasses would report in blocks of several lines and know no group and no `peers`, so every message would
be written here all the same. Hydra's structured configs check types but no limits, have no `Literal`, and see what YAML
and the command line say alone, not `SGD(learning_rate=-1)` in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from crossbow_py.core.errors import UserError

T = TypeVar("T")

_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", operator.ge),
    "above": ("greater than", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
_NAME = re.compile(r"\w+")
_UPPER = ("maximum", "below")
_LARGEST, _SMALLEST = 3.4e38, 1.2e-38  # float32, of normal numbers
_LONGEST_SHOWN = 200
_MOST_NAMED = 3  # choices of a group that have a key
_MOST_COUNTED = 2**62  # no counter of ours gets there
_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping", type: "a class",
}  # fmt: skip


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    why: str | None = None,
) -> Any:
    """Declare a dataclass field with its one-line meaning and its limits (`minimum` and `maximum` are inclusive).

    `why` is the reason for the limit, if it is not obvious; for the upper one if there are two.
    """
    metadata = {"help": help, "minimum": minimum, "above": above, "maximum": maximum, "below": below, "why": why}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(settings: Any) -> None:
    """Check the types and limits of every field. Raises UserError naming the field, the rule and the value.

    Lists become tuples, and whole numbers floats, where the field's type asks for it.
    """
    group = getattr(type(settings), "GROUP", "")
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        path = f"{group}.{field.name}" if group else field.name
        given, hint = getattr(settings, field.name), hints[field.name]
        value = _convert(given, hint)
        object.__setattr__(settings, field.name, value)
        if not fits(value, hint):
            unquoted = str in _options(hint) and isinstance(value, int | float)  # as in output_dir=2024
            quotes = f"; text is written in quotes: {path}='\"...\"'" if unquoted else ""
            listed = f"; write {path}=[{written(given)}]" if fits((value,), hint) else ""
            raise UserError(f"{path} must be {_describe(hint)}, got {shown(given)}{quotes}{listed}.")
        other = [key for key in value if not isinstance(key, str)] if isinstance(value, Mapping) else []
        if other:
            raise UserError(f"{path} must have names as its keys, got {shown(other[0])}; write {{name: value}}.")
        _check_texts(path, value)
        for number in value if isinstance(value, tuple) else (value,):
            _check_limits(path, number, field.metadata)


def read_as(kind: type[T], plain: Any) -> T | None:
    """Return the dataclass that plain values are, as of a file that anybody may have written; None if they are none."""
    try:
        found = kind(**plain)
        check(found)
    except (UserError, TypeError):
        return None
    return found


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "", peers: Collection[type] = ()) -> T:
    """Build the settings class `cls`, which checks itself, from plain values. Raises UserError for an unknown key.

    The message suggests a known key, or names the `peers` (other choices of the group) that have it. A class's `LACKS`
    holds keys that it cannot have, each with the reason.
    """
    known = _names(cls)
    for key in values:
        if key not in known and key in getattr(cls, "LACKS", {}):
            name, reason = getattr(cls, "NAME", cls.__name__), getattr(cls, "LACKS", {})[key]
            owners = _owners(path, key, peers)
            other = f", or choose {owners}" if owners and owners.count(" or ") < _MOST_NAMED else ""
            raise UserError(f"{_join(path, key)} means nothing to {path}={name}: {reason}; leave it out{other}.")
        if key not in known:
            if other := _owners(path, key, peers):
                raise UserError(f"unknown key {_join(path, key)}, which {other} has; choose that, or leave it out.")
            raise UserError(f"unknown key {_join(path, key)}{suggestion(key, known, path)}")
    return cls(**values)


def check_no_group_left_out(
    words: typing.Iterable[str], known: Collection[str], groups: Mapping[str, Collection[type]]
) -> None:
    """Refuse an unknown top-level key that belongs into a group, as in learning_rate=0.1 or lr=0.1."""
    for word in words:
        if word in known or any(key.endswith(f"_{word}") for key in known):  # epochs means max_epochs before a group's
            continue
        names = {group: sorted(set().union(*map(_names, classes))) for group, classes in groups.items()}
        meant = [f"{group}.{name}" for group in names for name in names[group] if _is_short_for(word, name)]
        if meant:
            raise UserError(f"unknown key {word}; did you mean {' or '.join(map(repr, meant))}?")


def _owners(path: str, key: str, peers: Collection[type]) -> str:
    """Return the choices of a group that have a key, as they are written on the command line."""
    return " or ".join(f"{path}={getattr(peer, 'NAME', '')}" for peer in peers if key in _names(peer))


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def to_mapping(settings: Any) -> dict[str, Any]:
    """Return a settings object as plain values (dict, list, str, int, float, bool, None), nested ones included."""
    return dict(_plain(settings))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field made by `setting`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the defaults of a settings class as plain values. Some classes have none that they would take."""
    return {field.name: _plain(default_of(field)) for field in dataclasses.fields(cls)}


def dotted(values: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def flat(values: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Return nested plain values by dotted keys. Null and lists become text."""
    return {
        key: value if isinstance(value, bool | int | float | str) else written(value)
        for key, value in dotted(values).items()
    }


def written(value: Any) -> str:
    """Return a plain value as written in YAML and on the command line; text without quotes, None as null."""
    if value is None or value is dataclasses.MISSING:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    try:
        return str(value)
    except ValueError:  # a whole number of thousands of digits
        return shown(value)


def apart_from_defaults(settings: Any) -> dict[str, Any]:
    """Return the values of a settings object that differ from the defaults."""
    values = {field.name: (getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)}
    return {name: value for name, (value, default) in values.items() if value != default}


class Settings:
    """Base of settings that are dataclasses: a keyword that there is none of is refused with the one that was meant."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Make an object for `__init__`. Raises TypeError, as that would, with a suggestion."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for word in given:
            if word not in known and not takes_any:
                raise TypeError(f"{cls.__name__} has no {word!r}{suggestion(word, [*known][1:])}")
        return super().__new__(cls)


def suggestion(word: object, known: typing.Iterable[str], path: str = "") -> str:
    """Return the end of a sentence: `; did you mean 'x'?`, or the list of known names if none is near.

    A name is near if it is spelled alike, or if it is the only one with these initials: lr for learning_rate. `word`
    may be any key of a YAML file, also a number.
    """
    word, names = str(word), sorted(known)
    near = difflib.get_close_matches(word.lower(), names, n=1)
    if not near:
        abbreviated = [name for name in names if _is_short_for(word, name)]
        near = abbreviated if len(abbreviated) == 1 else []
    if near:
        return f"; did you mean {_join(path, near[0]) if path else near[0]!r}?"
    return f"; known: {', '.join(names)}." if names else "; there is none here, leave it out."


def _is_short_for(word: str, name: str) -> bool:
    """Return whether a word is the name, or the initials of its words: lr for learning_rate."""
    return word == name or ("_" in name and word == "".join(part[:1] for part in name.split("_")))


def _join(path: str, key: object) -> str:
    """Return a dotted key, quoted if it is no plain name: a blank in it would not be seen otherwise."""
    name = str(key) if _NAME.fullmatch(str(key)) else shown(key)
    return f"{path}.{name}" if path else name


def _convert(value: Any, hint: Any) -> Any:
    """Convert without any loss: NumPy's numbers to Python's, whole ones to float where asked, lists to tuples."""
    options = _options(hint)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list):
        item = next((typing.get_args(o)[0] for o in options if typing.get_origin(o) is tuple), None)
        return tuple(_convert(entry, item) if item else entry for entry in value)
    if isinstance(value, int) and not isinstance(value, bool) and float in options and int not in options:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # which every field refuses
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value is of the type that a field declares."""
    return any(_fits_one(value, option) for option in _options(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return any(type(value) is type(option) and value == option for option in typing.get_args(hint))
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        items = typing.get_args(hint)
        expected = items[:1] * len(value) if len(items) == 2 and items[1] is ... else items
        return len(value) == len(expected) and all(map(fits, value, expected))
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def allowed(cls: type, name: str) -> str:
    """Return the types and limits of a settings field in words."""
    field = next(each for each in dataclasses.fields(cls) if each.name == name)
    limits = [
        f"{words} {field.metadata[limit]:,}"
        for limit, (words, _) in _LIMITS.items()
        if field.metadata.get(limit) is not None
    ]
    return ", ".join([_describe(typing.get_type_hints(cls)[name]), *limits])


def known_fields(of: type, values: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Return the values from a checkpoint that the class `of` has fields for. Newer versions may have written more.

    Raises TypeError for a value of another type than its field, ValueError for an integer out of range.
    """
    hints = typing.get_type_hints(of)
    known = {name: value for name, value in values.items() if name in hints}
    for name, value in known.items():
        if not fits(value, hints[name]):
            raise TypeError(f"{name} is {shown(value)}")
        if isinstance(value, int) and not least <= value < _MOST_COUNTED:
            raise ValueError(f"{name} is {value}")
    return known


def _describe(hint: Any) -> str:
    words = []
    for option in _options(hint):
        if option is Path:  # from Python alone
            continue
        if option is type(None):
            words.append("null")
        elif typing.get_origin(option) is typing.Literal:
            names = typing.get_args(option)
            words.append(("one of " if len(names) > 1 else "") + ", ".join(map(str, names)))
        elif typing.get_origin(option) is tuple:
            words.append(f"a list, each {_describe(typing.get_args(option)[0])}")
        elif dataclasses.is_dataclass(option):
            words.append("a mapping")
        else:
            words.append(_WORDS.get(typing.get_origin(option) or option, getattr(option, "__name__", str(option))))
    return " or ".join(words)


def shown(value: Any) -> str:
    """Return a value's `repr` for a message, cut to what fits on a screen."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a very large number"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _check_texts(path: str, value: Any) -> None:
    """Refuse text that cannot be a file name or be written to a file, at any depth."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            _check_texts(path, item)
    # Bytes on the command line that are not UTF-8 arrive as lone surrogates.
    elif isinstance(value, str) and any(each == "\0" or "\ud800" <= each <= "\udfff" for each in value):
        raise UserError(f"{path} must be text in UTF-8 without NUL characters, got {shown(value)}; leave them out.")


def _check_limits(path: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path} must be a finite number, got {value}.")
    if isinstance(value, float) and abs(value) > _LARGEST:
        raise UserError(f"{path} must be a number that 32 bits can hold (up to {_LARGEST:.1e}), got {value}.")
    if metadata.get("above") == 0 and 0 < value < _SMALLEST:  # which may become 0
        raise UserError(f"{path} must be a number that 32 bits can hold (from {_SMALLEST:.1e} on), got {value}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{path} must be a number of at most 63 bits, got {shown(value)}.")
    for name, (words, holds) in _LIMITS.items():
        limit = metadata.get(name)
        if limit is not None and not holds(value, limit):
            explained = name in _UPPER or not any(metadata.get(upper) is not None for upper in _UPPER)
            why = f": {metadata['why']}" if metadata.get("why") and explained else ""
            raise UserError(f"{path} must be {words} {limit}, got {shown(value)}{why}.")
