"""Mutants: whether tests notice small faults in a module. `python -m tests.mutants MODULE.py ... --tests PATH ...`.

A mutant is the module with one fault: an operator swapped, a condition negated, a number off by one, a statement left
out. A sample of them is drawn, and each is run in a process of its own, in which the import of the module yields the
faulty source. It is killed if a test fails or hangs. Tests that start the package in other processes do not see it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 — before the fork, so that each mutant need not import it again
import pytest
import torch  # noqa: F401

_SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def mutants_of(source: str) -> list[tuple[str, str]]:
    """Return every mutant of a module: a description that begins with the line, and the faulty source."""
    tree = ast.parse(source)
    return [(f"{getattr(node, 'lineno', 0)}: {what}", ast.unparse(faulty)) for node, what, faulty in _faults(tree)]


def _faults(tree: ast.Module) -> Iterator[tuple[Any, str, ast.Module]]:
    nodes = list(ast.walk(tree))
    for index, node in enumerate(nodes):
        for what, change in _changes(node):
            faulty = copy.deepcopy(tree)
            change(list(ast.walk(faulty))[index])
            yield node, what, ast.fix_missing_locations(faulty)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield what can be done to a node: a description, and a function that does it in place."""
    operator = getattr(node, "op", None)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(operator) in _SWAPS:
        other = _SWAPS[type(operator)]
        yield f"{ast.unparse(node)} by {other.__name__}", lambda own: setattr(own, "op", other())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        other = _SWAPS[type(node.ops[0])]
        yield f"{ast.unparse(node)} by {other.__name__}", lambda own: own.ops.__setitem__(0, other())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield f"not {ast.unparse(node.test)}", lambda own: setattr(own, "test", ast.UnaryOp(ast.Not(), own.test))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{node.value} + 1", lambda own: setattr(own, "value", own.value + 1)
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        for at, statement in enumerate(statements if isinstance(statements, list) else []):
            is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if is_call or isinstance(statement, ast.AugAssign | ast.Raise):
                yield (
                    f"without {ast.unparse(statement).splitlines()[0]}",
                    lambda own, field=field, at=at: getattr(own, field).__setitem__(at, ast.Pass()),
                )


class _Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source
        self._name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a spec for the module."""
        if name != self._name:
            return None
        file = self._path.resolve()
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=inside)

    def create_module(self, spec: Any) -> None:
        """Leave it to Python."""

    def exec_module(self, module: Any) -> None:
        """Run the faulty source."""
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def is_killed(path: Path, source: str, tests: list[str], limit_s: float, marks: str) -> bool:
    """Return whether a test with these marks fails or hangs with this source of the module."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.meta_path.insert(0, _Faulty(path, source))
        code = 1
        with contextlib.suppress(BaseException):
            code = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *tests]))
        os._exit(code)
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _names(mutants: list[tuple[Path, str]]) -> list[list[str | int]]:
    """Return names that hold in another commit: the module, the fault, and its number among equal ones."""
    seen = Counter[tuple[str, str]]()
    names: list[list[str | int]] = []
    for path, what in mutants:
        key = str(path), what.partition(": ")[2]
        seen[key] += 1
        names.append([*key, seen[key]])
    return names


def main(arguments: list[str]) -> int:
    """Try a sample of mutants, and print those that live. Returns 1 if the tests fail without any fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--sample", type=int, default=40, help="mutants in all modules together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--marks", default="not gpu", help="which of the tests, as `pytest -m`")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path, help="where to write which live; of those that it names, try these alone")
    given = parser.parse_args(arguments)
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else None
    every = [(path, *each) for path in given.modules for each in mutants_of(path.read_text())]
    names = _names([(path, what) for path, what, _ in every])
    chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    if known is not None:
        chosen = [each for each, name in zip(every, names, strict=True) if name in known]
    path = given.modules[0]
    if is_killed(path, path.read_text(), given.tests, given.limit_s, given.marks):
        print("the tests fail without any fault")
        return 1
    alive = []
    for path, what, source in chosen:
        if not is_killed(path, source, given.tests, given.limit_s, given.marks):
            alive.append(names[every.index((path, what, source))])
            print(f"lives: {path}:{what}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed")
    if given.json and known is None:
        given.json.write_text(json.dumps(alive, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
