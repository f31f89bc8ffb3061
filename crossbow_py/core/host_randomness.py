"""The generators of the process: Python's, NumPy's and torch's on the CPU, which data sets and models draw from."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def host_state() -> Hashable:
    """What Python's and NumPy's stand at: another value after a draw, which a graph would repeat."""
    state = np.random.get_state(legacy=False)
    generator, kept = state["state"], (state["has_gauss"], state["gauss"])  # it draws normal values by twos
    return random.getstate(), generator["key"].tobytes(), generator["pos"], kept


@contextmanager
def kept_host_state() -> Iterator[None]:
    """Put Python's and NumPy's generators back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put all three back afterwards."""
    with torch.random.fork_rng(devices=[]), kept_host_state():
        yield
