"""What is set before torch is imported."""

from __future__ import annotations

import pytest

from crossbow_py.environment import SPIN_COUNT, limit_spinning


def test_waiting_threads_give_up_early_where_nothing_else_was_said():
    variables = {"HOME": "/home/a"}
    limit_spinning(variables, {"os"})
    assert variables == {"HOME": "/home/a", "GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_said_stays(said):
    variables = dict(said)
    limit_spinning(variables, set())
    assert variables == said


def test_nothing_is_set_once_torch_is_there():
    variables = {}
    limit_spinning(variables, {"torch"})
    assert variables == {}
