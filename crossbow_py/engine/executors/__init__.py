"""Executors by name, and the choice `auto` makes."""

from __future__ import annotations

import torch

from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.executors.threads import ThreadsExecutor
from crossbow_py.errors import UserError

EXECUTORS: dict[str, type[Executor]] = {
    executor.NAME: executor for executor in (SerialExecutor, ThreadsExecutor, FusedExecutor)
}


def choose_executor(name: str, device: torch.device, num_learners: int) -> type[Executor]:
    """The executor class for a name; `auto` takes threads for several learners on CPU, else serial.

    Raises UserError for an executor that cannot run on the device.
    """
    if name == "auto":
        name = "threads" if device.type == "cpu" and num_learners > 1 else "serial"
    if name == "threads" and device.type != "cpu":
        raise UserError(f"executor=threads runs on CPU only, and device is {device.type}; set executor=auto.")
    return EXECUTORS[name]


__all__ = ["EXECUTORS", "Executor", "SerialExecutor", "ThreadsExecutor", "choose_executor"]
