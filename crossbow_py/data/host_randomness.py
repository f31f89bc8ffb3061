"""The generators of the process: Python's, NumPy's and torch's on the CPU, which data sets and models draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


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
