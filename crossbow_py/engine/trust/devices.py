"""The parts that may be used on a device: those that held there when they were tried, and switches of the environment.

A kernel that strays ends the process, one that is wrong spoils the numbers. So on CUDA each part is tried first in a
child process (`train/ladder/`), and its outcome is remembered in the user's cache, by the device's name and driver,
the versions of torch and Triton, and the code of this package. What was not tried, or failed, is not used. On CPUs
everything may be.

A *feature* is a name: `serial`, `bf16`, `fused`, `streams`, `graphs`, or one of the kernels in `core/switches.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pynvml
import torch

from crossbow_py.core.measured import Remembered, digest, processor
from crossbow_py.core.settings import read_as
from crossbow_py.core.switches import GRAPHS_VARIABLE, KERNELS, KERNELS_VARIABLE, read_switches
from crossbow_py.core.version import PACKAGE, __version__

Status = Literal["passed", "failed", "skipped"]
GRAPHS = "graphs"
_ENDED: dict[Status, str] = {"failed": "failed when they were tried", "skipped": "were not tried"}
_COMPUTES = ("core", "data", "engine", "train/ladder")
UNTRIED = "not tried on this GPU yet (python -m crossbow_py.check tries it)"


@dataclass(frozen=True)
class Outcome:
    """The end of a rung.

    Attributes:
        status: whether it passed.
        reason: why it did not, on one line.
        seconds: the time it took.
        proves: the features that may be used if it passed.
        may_change: whether it failed for something that passes, such as memory that others hold; not remembered.
    """

    status: Status
    reason: str = ""
    seconds: float = 0.0
    proves: tuple[str, ...] = ()
    may_change: bool = False

    @property
    def passed(self) -> bool:
        """True if it passed."""
        return self.status == "passed"


class RememberedOutcomes(Remembered):
    """The outcomes of rungs by device. Those of this process are known even where no file can be written."""

    _OWN: dict[str, str] = {}  # noqa: RUF012  shared on purpose

    def __init__(self, path: Path | None = None) -> None:
        super().__init__("ladder.json", path)

    def of(self, device: torch.device) -> dict[str, Outcome]:
        """Return the outcomes by the names of rungs; what cannot be read is as if it had not been tried."""
        key = digest(facts(device))
        return {**_outcomes(self.recall(key)), **_outcomes(self._OWN.get(key))}

    def keep(self, device: torch.device, outcomes: Mapping[str, Outcome]) -> bool:
        """Remember the outcomes of some rungs, except those that may change; return whether later processes know."""
        lasting = {name: outcome for name, outcome in outcomes.items() if not outcome.may_change}
        every = {**{name: each for name, each in self.of(device).items() if name not in outcomes}, **lasting}
        key, text = digest(facts(device)), _json(every)
        self._OWN[key] = text
        return self.remember(key, text)

    def known(self, device: torch.device) -> str:
        """Return what is remembered of a device, for `share` in another process."""
        return _json(self.of(device))

    def share(self, device: torch.device, known: str) -> None:
        """Take over what another process knows of an equal device, even where no file can be written."""
        self._OWN[digest(facts(device))] = known


def _json(outcomes: Mapping[str, Outcome]) -> str:
    return json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()})


def _outcomes(text: str | None) -> dict[str, Outcome]:
    """Return outcomes by name from JSON; none from what is not theirs."""
    try:
        found = {str(name): read_as(Outcome, own) for name, own in json.loads(text or "{}").items()}
    except (ValueError, AttributeError):
        return {}
    whole = {name: outcome for name, outcome in found.items() if outcome is not None}
    return whole if len(whole) == len(found) else {}


def facts(device: torch.device) -> dict[str, str]:
    """Return what outcomes depend on: the device, its driver, versions, code. Words stand for what is not there."""
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else f"{device.type}: {processor()}",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_cuda else "",
        "driver": _driver() if on_cuda else "",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()) if on_cuda else "",  # type: ignore[no-untyped-call]
        "triton": _triton() if device.type == "cuda" else "",
        "crossbow_py": __version__,
        "code": _code(),
    }


@cache
def _code() -> str:
    """Return a digest of the code that computes on devices: versions say nothing of a changed checkout."""
    files = sorted(file for folder in _COMPUTES for file in (PACKAGE / folder).rglob("*.py"))
    return digest({str(file.relative_to(PACKAGE)): digest(file.read_text(encoding="utf-8")) for file in files})


@cache
def _driver() -> str:
    """Return the version of the NVIDIA driver; `unknown` without NVML."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return "unknown"


@cache
def _triton() -> str:
    """Return Triton's version, without importing it."""
    for name in ("triton", "pytorch-triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none" if importlib.util.find_spec("triton") is None else "unknown"


def proven(outcomes: Mapping[str, Outcome]) -> frozenset[str]:
    """Return the features that rungs which passed have proven."""
    return frozenset(feature for outcome in outcomes.values() if outcome.passed for feature in outcome.proves)


def why_not(feature: str, device: torch.device) -> str | None:
    """Return why a feature must not be used on a device, as half a sentence; None if it may be.

    Reads a small file on CUDA. Raises UserError for a switch that means nothing.
    """
    switches = read_switches()
    if feature in KERNELS and switches.kernels is not None:
        return None if feature in switches.kernels else f"{KERNELS_VARIABLE} leaves them out"
    if feature == GRAPHS and switches.graphs is not None:
        return None if switches.graphs else f"{GRAPHS_VARIABLE} is 0"
    return None if device.type != "cuda" else _refusal(feature, RememberedOutcomes().of(device))


def _refusal(feature: str, outcomes: Mapping[str, Outcome]) -> str | None:
    found = next((outcome for outcome in outcomes.values() if feature in outcome.proves), None)
    what = "these kernels" if feature in KERNELS else "graphs" if feature == GRAPHS else f"rounds in {feature}"
    if found is None:
        return f"{what} were {UNTRIED}"
    if found.passed:
        return None
    return f"{what} {_ENDED[found.status]} here: {found.reason.rstrip('.')}"


def in_use(device: torch.device) -> list[str]:
    """Return the kernels and graphs that fused rounds use on a device: what a measured choice depends on."""
    return [feature for feature in (*KERNELS, GRAPHS) if why_not(feature, device) is None]
