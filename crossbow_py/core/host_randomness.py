"""The process's random generators, which data sets and models draw from: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def host_state() -> Hashable:
    """Return the state of Python's and NumPy's generators. A draw changes it, which a captured graph would repeat."""
    state = np.random.get_state(legacy=False)
    generator, kept = state["state"], (state["has_gauss"], state["gauss"])  # it draws normal values in pairs
    return random.getstate(), generator["key"].tobytes(), generator["pos"], kept


@contextmanager
def kept_host_state() -> Iterator[None]:
    """Restore Python's and NumPy's generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def kept_torch_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's generator of the CPU after the block, and that of `device` if it is a CUDA device.

    No other: by default torch looks at the generators of all GPUs it sees, which makes the process use them.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield


@contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's generators after the block; see `kept_torch_state`."""
    with kept_torch_state(device), kept_host_state():
        yield
