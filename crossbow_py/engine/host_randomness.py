"""Python's and numpy's own generators, from which a model may draw unasked: a graph would repeat what was drawn."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np


def host_state() -> Hashable:
    """What both generators stand at: another value after a draw."""
    legacy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), legacy["key"].tobytes(), legacy["pos"]


@contextmanager
def kept_host_state() -> Iterator[None]:
    """Put both generators back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
