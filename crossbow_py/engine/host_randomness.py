"""Python's and numpy's own generators, from which a model may draw unasked: a graph would repeat what was drawn."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np


def host_state() -> Hashable:
    """What both generators stand at: another value after a draw."""
    state = np.random.get_state(legacy=False)
    generator, kept = state["state"], (state["has_gauss"], state["gauss"])  # it draws normal values by twos
    return random.getstate(), generator["key"].tobytes(), generator["pos"], kept
