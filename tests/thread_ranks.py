"""Ranks that are threads of one process: what they gather goes through a list. For code that decides, not trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossbow_py.distributed.ranks import Ranks

PATIENCE_S = 20.0


class _Table:
    """Where all put something, and all read it once everybody has."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._put: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._put[rank] = value
        self._barrier.wait(PATIENCE_S)
        found = list(self._put)
        self._barrier.wait(PATIENCE_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadRanks(Ranks):
    """One of them."""

    def __init__(self, table: _Table, rank: int) -> None:
        super().__init__()
        self._table, self.rank, self.num_ranks = table, rank, table.num_ranks
        self.local_rank, self.num_local, self.token = rank, table.num_ranks, "threads"

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(map(float, each)) for each in self._table.exchange(self.rank, list(values))]

    def gather_texts(self, text: str) -> list[str]:
        return self._table.exchange(self.rank, text)

    def add(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._table.exchange(self.rank, values.clone())).sum(0))


def on_threads(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """What `function(ranks, *arguments)` returns on each rank, or the exception it raises."""
    table, found = _Table(num_ranks), [None] * num_ranks

    def run(rank: int) -> None:
        try:
            found[rank] = function(ThreadRanks(table, rank), *arguments)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank neither answers nor ends"
    return found
