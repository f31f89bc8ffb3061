"""The process's random generators: Python's, NumPy's and torch's on the CPU, which data sets and models draw from."""

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
def kept_generators() -> Iterator[None]:
    """Restore all three generators after the block."""
    with torch.random.fork_rng(devices=[]), kept_host_state():
        yield
