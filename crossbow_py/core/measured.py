"""Measure, choose, remember: the fastest of several ways, and choices that are kept in the user's cache.

What is kept there, compiled code included, only costs time when it is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from crossbow_py.core.files import read_text, replacing

_TRIES, _TRIED_S = 3, 0.05  # of every call, at least
Name = TypeVar("Name")
_MAX_KEPT = 5_000  # a few hundred layers of a few networks, forward and backward


def fastest(runs: Mapping[Name, Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> Name:
    """Return the name of the call that takes the least time, by the median of calls in turn after one to warm up."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begun = clock()
    while len(next(iter(times.values()))) < _TRIES or clock() - begun < _TRIED_S * len(runs):
        for name, run in runs.items():
            before = clock()
            run()
            times[name].append(clock() - before)
    return min(times, key=lambda name: statistics.median(times[name]))


def user_cache() -> Path:
    """Return the folder `crossbow_py` in `$XDG_CACHE_HOME` or `~/.cache`, which need not exist.

    Raises OSError for a user without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"there is no home folder ({error})") from error
    return folder / "crossbow_py"


class Remembered:
    """Choices of earlier runs, kept in one small file. A file that cannot be read or written is ignored."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self._name, self._given = name, path

    @property
    def path(self) -> Path:
        """Return the file. Raises OSError for a user without a home."""
        return self._given or user_cache() / self._name

    def recall(self, key: str) -> str | None:
        """Return the choice kept under a fingerprint, None without one."""
        return self._read().get(key)

    def remember(self, key: str, choice: str) -> bool:
        """Keep a choice, and return whether it could be written. The oldest ones are dropped beyond 5,000."""
        kept = {**self._read(), key: choice}
        text = json.dumps(dict(list(kept.items())[-_MAX_KEPT:]), indent=0)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial:
                partial.write_text(text)
            return True
        return False

    def _read(self) -> dict[str, str]:
        try:
            values = json.loads(read_text(self.path))
        except (OSError, ValueError, RecursionError):
            return {}
        plain = values if isinstance(values, dict) else {}
        return {str(key): value for key, value in plain.items() if isinstance(value, str)}


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return what is known of a model without running it: its class, its layers as text, and parameters' shapes."""
    return {
        "model": (type(model).__module__, type(model).__qualname__, f"{model}"),
        "parameters": [tuple(parameter.shape) for parameter in model.parameters()],
    }


def fingerprint(**facts: Any) -> str:
    """Return a key for what a choice depends on; torch, the cores and the processor or GPU are added."""
    device = torch.device(facts["device"])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return digest({**facts, "where": where, "torch": torch.__version__, "threads": torch.get_num_threads()})


def digest(facts: Any) -> str:
    """Return 24 hexadecimal digits that stand for plain facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def processor() -> str:
    """Return the name and number of the cores this process may use."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
        return f"{', '.join(sorted(names))} x{len(os.sched_getaffinity(0))}"
    return str(os.cpu_count())
