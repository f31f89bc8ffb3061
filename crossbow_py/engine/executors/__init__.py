"""Executors by name, and the devices they run on.

To add one, add a file with a subclass of `Executor` that has a `NAME`.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch

from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.fused_threads import FusedThreadsExecutor
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.executors.threads import ThreadsExecutor
from crossbow_py.engine.trust import why_not
from crossbow_py.engine.update.optimizers import Optimizer

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_ON_ALL_CORES = {FusedThreadsExecutor.NAME: FusedExecutor.NAME, ThreadsExecutor.NAME: SerialExecutor.NAME}
_TRIED = ("fused", "streams")  # on CUDA by rungs of their own; others need none
# The order in which executors are listed and tried; others come after these.
_FIRST: tuple[type[Executor], ...] = (
    SerialExecutor,
    ThreadsExecutor,
    FusedExecutor,
    FusedThreadsExecutor,
    StreamsExecutor,
)


def _executors(base: type[Executor]) -> list[type[Executor]]:
    """Return a class and its subclasses, as far as they define a `NAME`."""
    derived = [executor for each in base.__subclasses__() for executor in _executors(each)]
    return [base, *derived] if "NAME" in vars(base) else derived


_FOUND = _executors(Executor)  # type: ignore[type-abstract]
EXECUTORS: dict[str, type[Executor]] = {executor.NAME: executor for executor in (*_FIRST, *_FOUND)}


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither `auto` nor that of an executor."""
    if name != "auto" and name not in EXECUTORS:
        raise UserError(f"executor must be one of auto, {', '.join(EXECUTORS)}, got {name!r}.")


def check_executor(name: str, device: torch.device) -> None:
    """Raise UserError for an executor that cannot run on the device."""
    where = EXECUTORS[name].DEVICE
    if where is not None and device.type != where:
        raise UserError(f"executor={name} runs on {where} only, and device is {device.type}; set executor=auto.")


def candidates(device: torch.device) -> list[str]:
    """Return the names that `executor=auto` chooses from: on CUDA those that were tried on the device, and passed."""
    fitting = [name for name, executor in EXECUTORS.items() if executor.DEVICE in (None, device.type)]
    able = [name for name in fitting if name not in _TRIED or why_not(name, device) is None]
    return [name for name in able if not EXECUTORS[name].EXPERIMENTAL]


def on_all_cores(name: str, num_learners: int) -> str:
    """Return `name`, or what takes the same bank and all cores if so few learners, a thread each, leave half idle."""
    idle = 2 * num_learners <= torch.get_num_threads()
    return _ON_ALL_CORES.get(name, name) if idle else name


def has_one_row(name: str, optimizer: Optimizer, mean: GradientMean | None) -> bool:
    """Return whether learners are one row of a bank: they stay equal, and executor and optimizer allow it.

    Groups that are clipped need the norms of the mean's parts, and torch's own optimizers keep a state for each row.
    """
    alike = mean is not None and mean.group_size is None
    steps = not optimizer.clips_groups and not optimizer.KEEPS_OWN_STATE
    return name in EXECUTORS and EXECUTORS[name].HAS_ONE_ROW and alike and steps


__all__ = [
    "EXECUTORS", "Executor", "SerialExecutor", "ThreadsExecutor", "candidates", "check_executor", "check_name",
    "has_one_row", "on_all_cores",
]  # fmt: skip
