"""The number of threads that torch splits an operator over, chosen and given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from crossbow_py.engine import intra_op
from crossbow_py.engine.intra_op import faster_threads, intra_op_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)  # that of all tests


@pytest.mark.parametrize(("alone_s", "together_s", "best"), [(1.0, 2.0, 1), (2.0, 1.0, 2)])
def test_threads_are_as_many_as_took_less_time(
    monkeypatch: pytest.MonkeyPatch, alone_s: float, together_s: float, best: int
) -> None:
    now_s = [0.0]

    def work() -> None:
        now_s[0] += alone_s if torch.get_num_threads() == 1 else together_s

    monkeypatch.setattr(intra_op.time, "perf_counter", lambda: now_s[0])
    assert faster_threads(work) == best
    assert torch.get_num_threads() == 2


def test_threads_are_given_back_by_work_that_fails() -> None:
    def fail() -> None:
        if torch.get_num_threads() == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        faster_threads(fail)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), intra_op_threads(1):
        fail()
    assert torch.get_num_threads() == 2
