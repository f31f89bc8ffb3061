"""Python's and numpy's generators: every draw shows, and none outlasts `kept_host_state`."""

from __future__ import annotations

import random

import numpy as np
import pytest

from crossbow_py.core.host_randomness import host_state, kept_host_state

DRAWS = {"random": random.random, "gauss": lambda: random.gauss(0, 1), "rand": np.random.rand, "randn": np.random.randn}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_changes_the_state(name):
    with kept_host_state():
        np.random.seed(0)
        states = []
        for _ in range(5):
            states.append(host_state())
            DRAWS[name]()
    assert len(set(states)) == 5


@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_inside_is_drawn_again(name):
    DRAWS[name]()
    with kept_host_state():
        inside = [DRAWS[name]() for _ in range(3)]
    assert [DRAWS[name]() for _ in range(3)] == inside
