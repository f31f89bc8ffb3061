"""Images/s of training on this checkout and on an earlier commit of it, by turns.

Each side is a process with the package of its own tree, and blocked but for its windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from crossbow_py.core.host import LoadSnapshot, foreign_share
from experiments.bench.machine import ROOT
from experiments.bench.windows import MAX_FOREIGN_SHARE, spread

MODELS = ("lenet", "resnet32")
EXECUTORS = ("serial", "threads", "fused", "fused_threads")
_WINDOWS, _ATTEMPTS = 3, 4
_SIDE = Path(__file__).with_name("throughput_side.py")


@dataclass(frozen=True)
class Window:
    """A side's result in a window. `foreign_share` is the cores' share that others took, None where it is unknown."""

    images_per_s: float
    foreign_share: float | None


class Side:
    """A process that trains; use it as a context manager."""

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
    """Medians of both sides, and of the ratio now ÷ before within repetitions.

    A repetition is two new processes, since where memory comes to lie makes one of a side faster than another by some
    percent; of each the median of its windows counts. Windows in which others were busy are dropped, and taken again.
    """
    found: dict[str, list[float]] = {"before": [], "now": []}
    dropped = 0
    for repetition in range(repetitions):
        with Side(before, model, executor) as old, Side(ROOT, model, executor) as new:
            rates, without = _by_turns({"before": old, "now": new}, repetition, seconds)
        dropped += without
        for name in found if rates["now"] else ():
            found[name].append(median(rates[name]))
    ratios = [now / then for now, then in zip(found["now"], found["before"], strict=True)]
    sides = {name: spread(values) for name, values in found.items()}
    return {"n": len(ratios), "dropped": dropped, "ratio": spread(ratios), **sides}


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
