"""Executors by name, and which of them run where."""

from __future__ import annotations

import torch

from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.fused_threads import FusedThreadsExecutor
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.executors.subarrays import FourSubArrays, TwoSubArrays
from crossbow_py.engine.executors.threads import ThreadsExecutor
from crossbow_py.errors import UserError

_ALL: tuple[type[Executor], ...] = (
    SerialExecutor,
    ThreadsExecutor,
    FusedExecutor,
    FusedThreadsExecutor,
    TwoSubArrays,
    FourSubArrays,
    StreamsExecutor,
)
EXECUTORS: dict[str, type[Executor]] = {executor.NAME: executor for executor in _ALL}


def check_executor(name: str, device: torch.device) -> None:
    """Raise UserError for an executor that cannot run on the device."""
    where = EXECUTORS[name].DEVICE
    if where is not None and device.type != where:
        raise UserError(f"executor={name} runs on {where} only, and device is {device.type}; set executor=auto.")


def candidates(device: torch.device) -> list[str]:
    """What `executor=auto` chooses from on a device."""
    fitting = [name for name, executor in EXECUTORS.items() if executor.DEVICE in (None, device.type)]
    return [name for name in fitting if not EXECUTORS[name].EXPERIMENTAL]


__all__ = ["EXECUTORS", "Executor", "SerialExecutor", "ThreadsExecutor", "candidates", "check_executor"]
