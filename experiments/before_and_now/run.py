"""Does this checkout train as fast as an earlier commit of it, and is it as soon under way?

    python experiments/before_and_now/run.py --before COMMIT [--repetitions 7] [--json PATH]

Each side is a process with the package of its own tree, and blocked but for its windows. README.md says how.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.host import LoadSnapshot, foreign_share
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE, spread
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]
MODELS = ("lenet", "resnet32")
EXECUTORS = ("serial", "threads", "fused", "fused_threads")
_WINDOWS, _ATTEMPTS = 3, 4
_SIDE = Path(__file__).with_name("side.py")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--before", metavar="COMMIT", required=True, help="which this checkout is compared with, as git knows it")
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="by default all there are")
    add("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS, help="by default all there are")
    add("--seconds", type=positive, default=1.5, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="of every measurement (default %(default)s)")

    def compare(given: argparse.Namespace) -> dict[str, Any]:
        with tree_of(given.before) as before:
            found = {
                f"{model} {executor}": measure(before, model, executor, given.repetitions, given.seconds)
                for model in given.models
                for executor in given.executors
            }
        return {"before": given.before, "throughput": found}

    return measure_and_write(parser, argv, compare, result_text)


@dataclass(frozen=True)
class Window:
    """A side's result in a window. `foreign_share` is the cores' share that others took, None where it is unknown."""

    images_per_s: float
    foreign_share: float | None


class Side:
    """A process that trains; use it as a context manager. `setup_s` is how long its first round took to be there."""

    def __init__(self, tree: Path, model: str, executor: str) -> None:
        # Without -P the folder of the script comes first, and with it what else lies there.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SIDE), model, executor], env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers, self._own_s = self._process.stdin, self._process.stdout, 0.0
        imported = Path(self._answers.readline().strip())
        assert imported.is_relative_to(tree), f"the side of {tree} imported {imported}"
        self.setup_s = float(self._answers.readline())

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.close()
        self._process.wait()
        self._answers.close()

    def window(self, seconds: float) -> Window:
        """Let it train."""
        before = replace(LoadSnapshot.take(), own_s=self._own_s)
        print(seconds, file=self._requests, flush=True)
        found = json.loads(self._answers.readline())
        self._own_s = found["own_s"]
        share = foreign_share(before, replace(LoadSnapshot.take(), own_s=self._own_s))
        return Window(found["images_per_s"], share)


def measure(before: Path, model: str, executor: str, repetitions: int, seconds: float) -> dict[str, Any]:
    """Images/s and seconds of set-up by both sides, and now ÷ before within repetitions.

    A repetition is two new processes, since where memory comes to lie makes one of a side faster than another by some
    percent; of each the median of its windows counts. Windows in which others were busy are dropped, and taken again.
    """
    found: dict[str, list[float]] = {"before": [], "now": []}
    setups: dict[str, list[float]] = {"before": [], "now": []}
    dropped = 0
    for repetition in range(repetitions):
        with Side(before, model, executor) as old, Side(ROOT, model, executor) as new:
            rates, without = _by_turns({"before": old, "now": new}, repetition, seconds)
        dropped += without
        setups["before"].append(old.setup_s)
        setups["now"].append(new.setup_s)
        for name in found if rates["now"] else ():
            found[name].append(median(rates[name]))
    return {"n": len(found["now"]), "dropped": dropped, **_sides(found), "setup_s": _sides(setups)}


def _sides(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = [now / then for now, then in zip(found["now"], found["before"], strict=True)]
    return {"ratio": spread(ratios), **{name: spread(values) for name, values in found.items()}}


def _by_turns(sides: dict[str, Side], first: int, seconds: float) -> tuple[dict[str, list[float]], int]:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    dropped = 0
    for side in sides.values():
        side.window(seconds)  # it warms up
    for turn in range(_WINDOWS * _ATTEMPTS):
        order = list(sides) if (first + turn) % 2 else list(reversed(sides))
        pair = {name: sides[name].window(seconds) for name in order}
        if any((own.foreign_share or 0.0) > MAX_FOREIGN_SHARE for own in pair.values()):
            dropped += 1
            continue
        for name, own in pair.items():
            rates[name].append(own.images_per_s)
        if len(rates["now"]) == _WINDOWS:
            break
    return rates, dropped


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Check another commit out beside this checkout, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def result_text(result: Result) -> str:
    columns = (("before", ",.0f"), ("now", ",.0f"), ("ratio", ".3f"))
    header = ["", f"commit {result['before']}, images/s", "now, images/s", "now ÷ before", "n"]
    rows = [
        [name, *(spread_text(own[key], form) for key, form in columns), str(own["n"])]
        for name, own in result["throughput"].items()
    ]
    if all("setup_s" in own for own in result["throughput"].values()):
        header += ["set-up before, s", "now, s", "now ÷ before"]
        for row, own in zip(rows, result["throughput"].values(), strict=True):
            row += [spread_text(own["setup_s"][key]) for key, _ in columns]
    return markdown_table(header, rows)


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
