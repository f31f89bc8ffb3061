"""Mutated recorded configurations, each a function of its number: values, keys and structure, and the text itself."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import yaml

from crossbow_py.cli.configuration import compose
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests.unit.fuzz.command_lines import KEYS, odd_value

Path = tuple[str, ...]

_RECIPES = (
    ["+experiment=digits"], ["+experiment=lenet"], ["+experiment=flowers"], ["model=custom", "model.target=a.b"],
    ["data=custom", "data.target=a.b", "optimizer=adamw"], ["+experiment=resnet32", "averaging=grouped_sma"],
)  # fmt: skip
# Beside those that can be written on a command line.
_ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), "1",
    "x", "a\nb", "\0", "\\${a}", "\\\\${a}", "a${b}'\"\\", "???", "{a: b}", "a,b", "~x", "+x", "@x", "!!x", "*x", "&x",
    "%x", "#x", "---", "a: b", "/dev/null/x", [], {}, [[]], [None], [1, "a", None], {"a": 1}, {"name": "mlp"},
    {"name": None}, {"name": ["mlp"]}, {"name": {"a": 1}}, {1: 2}, {None: 1}, {True: 1}, {1.5: 1}, {"": 1}, {"a.b": 1},
    {"${seed}": 1}, {"a b": {"c d": [1]}}, {"a=b,c": "'"}, [1] * 5000, {str(number): number for number in range(2000)},
    b"\x00\xff", {1, 2}, datetime.date(2001, 2, 3), datetime.datetime(2001, 2, 3, 4, 5), [{"a": [{"b": [{}]}]}],
]  # fmt: skip
_ODD_KEYS: list[Any] = [
    None, True, 0, -1, 1.5, float("nan"), "", " ", "x", "é", "a.b", "a b", "a=b", "a,b", "${seed}", "${", "\x1b[2J",
    "\u202e", "~a", "+a", "@a", "'", '"', "\\", "_target_", "hydra", "defaults", "space", "name", "x" * 10_000, "\n",
    10**400, datetime.date(2001, 2, 3), b"x", "seed", "__class__", "__init__", "__dict__", "self", "cls", "GROUP",
    "NAME", "kwargs",
]  # fmt: skip
_NUMBERED = [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 30)]
_LINES = [
    "seed: 1", "seed: 1\nseed: 2", "model: {name: mlp}", "model: {name: mlp, name: lenet}", "x: &x 1\ny: *x",
    "x: &x {y: *x}",
    "x: *nothing", "<<: {seed: 3}", "x: &x {seed: 4}\n<<: *x", "<<: 3", "<<: [1, 2]",
    "a0: &a0 [x]\n" + "\n".join(_NUMBERED),
    "x: !!python/object:os.system {}", "x: !!python/object/apply:os.system [exit 1]", "x: !!python/name:os.system",
    "x: !y 1",
    "!!python/object/new:type {}", "x: !!binary aGVsbG8=", "x: !!binary ///", "x: !!set {a, b}", "x: !!omap [a: 1]",
    "x: !!pairs [a: 1]", "x: !!timestamp 2001-99-99", "x: 2001-99-99", "x: 2001-02-03",
    "x: 2001-02-03 04:05:06.7 +99:99",
    "x: !!int y", "x: !!float y", "x: !!bool y", "x: !!null y", "x: !!str [1]", "x: !!map [1]", "x: !!seq {}",
    "x: =", "x: 0x",
    "x: 0b2", *(f"{key}: 0x" + "f" * 10_000 for key in ("x", "seed", "model", "distributed", "space", "output_dir",
    "0x1")),
    "0x" + "f" * 10_000 + ": 1", "model: {0x" + "f" * 10_000 + ": 1}", "model: {name: 0x" + "f" * 10_000 + "}",
    "x: 1:90", "x: 0o8", "x: 1e999999999", "x: .inf", "x: 1_0", "x: " + "9" * 10_000, "? [1, 2]\n: 3", "? {a: b}\n: 3",
    "? x", "? |\n  a\n  b\n: 3", "- 1", "x", "x: - 1", "x: [1", "x: {a", "x: 'a", 'x: "a', 'x: "\\q"',
    'x: "\\ud800"', "\tx: 1",
    "x:\n\t- 1", "x: `a`", "x: @a", "x: %a", "%YAML 9.9\n---\nx: 1", "%TAG ! a\n---", "---\nx: 1", "...\nx: 1",
    "---\n---\n---",
    "x: |\n  a\n b", "x: >99\n a", "x: " + "[" * 60 + "]" * 60, "x: " + "[" * 30_000, "x: " + "{a: " * 5000,
    "- " * 5000 + "x",
    "\n".join(" " * depth + f"a{depth}:" for depth in range(1000)), "x: " + "1, " * 50_000,
    "x: [" + "1, " * 50_000 + "]",
    "#" * 100_000, "\n" * 100_000, "\ufeffx: 1", "x: \ufeff", "x: \x85", "x: \u2028y", "x: \x07", "x: \x7f",
    "x: \x00", "null: 1",
    "true: 1", "1: 1", "1.5: 1", ".nan: 1", "~: 1", "'': 1", "2001-02-03: 1", "space: {}", "space: 1", "space: [seed]",
    "seed: ${seed}", "a: ${b}\nb: ${a}", "${seed}: 1", "x: ${oc.env:HOME}", "x: ${.x}", "x: ${x", "x: ???", "seed: ???",
    "model: ???", "model: null", "model: []", "model: mlp", "data: 3", "averaging: {}", "distributed: null",
    "distributed: 3",
]  # fmt: skip
_WHOLE = ["", " ", "\n", "null", "[]", "{}", "3", "x", "- a\n- b", "---", "...", "\x00", "# only this",
"!!set {seed}", "&a [*a]"]


@cache
def _plain(is_search: bool, recipe: int) -> dict[str, Any]:
    if is_search:
        return config_to_mapping(compose(["+experiment=" + ("search_digits", "search_lenet")[recipe % 2]],
        SearchConfig))
    return config_to_mapping(compose(_RECIPES[recipe], TrainConfig))


def recorded_file(number: int, is_search: bool = False) -> bytes:
    """What a config.yaml could hold after somebody's hand, editor, script, disk or version has been at it."""
    draw = random.Random(-number - 1)
    plain = _copied(_plain(is_search, draw.randrange(len(_RECIPES))))
    kind = draw.random()
    for _ in range(0 if kind > 0.9 else draw.choice((1, 1, 1, 2, 3))):
        draw.choices(*zip(*_CHANGES, strict=True))[0](draw, plain)
    text = yaml.dump(plain, allow_unicode=draw.random() < 0.5, sort_keys=False, default_flow_style=draw.random() < 0.1)
    if kind > 0.5:
        text = _other_text(draw, text)
    content = text.encode("utf-8", "surrogatepass")
    return _other_bytes(draw, content) if draw.random() < 0.15 else content


def _copied(value: Any) -> Any:
    return {key: _copied(own) for key, own in value.items()} if isinstance(value, dict) else value


def _holder(draw: random.Random, plain: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping itself, or one in it."""
    nested = [own for own in plain.values() if isinstance(own, dict) and own]
    return _holder(draw, draw.choice(nested)) if nested and draw.random() < 0.6 else plain


def _odd(draw: random.Random) -> Any:
    return odd_value(draw) if draw.random() < 0.4 else _copied(draw.choice(_ODD_VALUES))


def _drop(draw: random.Random, plain: dict[Any, Any]) -> None:
    held = _holder(draw, plain)
    held.pop(draw.choice(list(held)), None) if held else None


def _replace(draw: random.Random, plain: dict[Any, Any]) -> None:
    held = _holder(draw, plain)
    if held:
        held[draw.choice(list(held))] = _odd(draw)


def _wrap(draw: random.Random, plain: dict[Any, Any]) -> None:
    held = _holder(draw, plain)
    if held:
        key = draw.choice(list(held))
        held[key] = draw.choice(([held[key]], {"a": held[key]}, {key: held[key]}, [held[key]] * 3, str(held[key])))


def _rename(draw: random.Random, plain: dict[Any, Any]) -> None:
    held = _holder(draw, plain)
    if held:
        key = draw.choice(list(held))
        held[draw.choice([f"{key}x", str(key)[1:], str(key).upper(), f" {key}", *draw.sample(_ODD_KEYS,
        3)])] = held.pop(key)


def _add(draw: random.Random, plain: dict[Any, Any]) -> None:
    key = draw.choice(KEYS) if draw.random() < 0.3 else draw.choice(_ODD_KEYS)
    _holder(draw, plain)[key] = _odd(draw)


def _exchange(draw: random.Random, plain: dict[Any, Any]) -> None:
    """Two values change places, whole groups among them."""
    held, other = _holder(draw, plain), _holder(draw, plain)
    if held and other:
        one, two = draw.choice(list(held)), draw.choice(list(other))
        held[one], other[two] = _copied(other[two]), _copied(held[one])


def _deepen(draw: random.Random, plain: dict[Any, Any]) -> None:
    value: Any = 1
    for _ in range(draw.choice((2, 10, 49, 60, 150))):
        value = draw.choice(({"a": value}, [value]))
    _holder(draw, plain)[draw.choice(KEYS)] = value


_CHANGES: list[tuple[Callable[[random.Random, dict[Any, Any]], None], int]] = [
    (_drop, 2), (_replace, 6), (_wrap, 2), (_rename, 2), (_add, 3), (_exchange, 2), (_deepen, 1),
]  # fmt: skip


def _other_text(draw: random.Random, text: str) -> str:
    """Lines more, fewer or twice; or another text altogether."""
    if draw.random() < 0.05:
        return draw.choice(_WHOLE)
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines) + 1)
    more = draw.choice([*(line + "\n" for line in _LINES), *lines, lines[at % len(lines)].replace(":", "", 1)])
    indent = draw.choice(("", "", "", "  ", "\t")) if at else ""
    return "".join([*lines[:at], indent + more, *lines[at + draw.choice((0, 0, 1)) :]])


def _other_bytes(draw: random.Random, content: bytes) -> bytes:
    """In another encoding, cut off, or with some bytes that are no text."""
    at = draw.randrange(len(content) + 1)
    text = content.decode("utf-8", "ignore")
    return draw.choice([
        b"\xef\xbb\xbf" + content, b"\xff\xfe" + content, text.encode("utf-16"), text.encode("utf-32"), content[:at],
        text.encode("latin-1", "replace"), content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"\r"),
        content + bytes(1000),
        content[:at] + draw.randbytes(3) + content[at:], content[:at] + b"\xe9" + content[at:], draw.randbytes(300),
        content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :], content * 3, b"\x80" * 50, content[::-1],
        content[:at] + b"\xed\xa0\x80" + content[at:], content[:at] + b"\x1b[2J" + content[at:],
    ])  # fmt: skip


def reading_command(number: int) -> tuple[str, str, list[str]]:
    """The folder whose config.yaml is such a file, and a command that reads it: its name, and what it is told."""
    draw = random.Random(number)
    search, run = "runs/search_digits/s", "runs/digits/a"
    return draw.choice([
        (run, "train", [f"config={run}"]), (run, "train", [f"config={run}/config.yaml", "seed=3"]),
        (run, "train", [f"config={run}", "model=lenet", "averaging=sma"]), (run, "train", ["-m", f"config={run}",
        "seed=1,2"]),
        (run, "estimate", [f"config={run}"]), (run, "estimate", [f"config={run}", "memory=8GiB", "optimizer=sgd"]),
        (run, "train", ["+experiment=digits", f"resume={run}"]), (run, "train", ["+experiment=digits", "resume=auto"]),
        (run, "train", ["+experiment=digits", "resume=auto", f"output_dir={run}"]), (run, "train",
        [f"output_dir={run}"]),
        (run, "predict", [run]), (run, "predict", [f"models=[{run},runs/digits/b]"]), (run, "predict", [run,
        "data=digits"]),
        (run, "predict", [f"{run}/model.safetensors", "targets=[a.b]"]), (run, "report", [run]),
        (run, "report", ["runs", "output_dir=out"]), (search, "search", [f"resume={search}",
        "+experiment=search_digits"]),
        (search, "search", ["+experiment=search_digits"]), (search, "search", ["+experiment=search_digits",
        f"output_dir={search}"]),
        (search, "train", [f"output_dir={search}"]), (search, "train", [f"config={search}"]), (search, "predict",
        [search]),
        (f"{search}/best", "predict", [search]), (f"{search}/best", "train", [f"config={search}/best"]), (search,
        "report", [search]),
    ])  # fmt: skip
