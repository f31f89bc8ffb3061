"""Checkpoints that can be told apart by the mark in their weights, written by one rank or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from crossbow_py.train.checkpoints.checkpoint import find_newest
from crossbow_py.train.checkpoints.writer import CheckpointWriter


def state(mark: float = 1.0, size: int = 6):
    return {
        "choices": {"executor": "serial"},
        "bank": {"weights": {"0.weight": torch.full((size,), mark)}, "step_counts": [1, 2]},
        "state": {"samples_seen": 8, "best_accuracy": None},
    }


def mark_of(saved) -> float:
    return saved["bank"]["weights"]["0.weight"][0].item()


def newest_mark(run_folder: Path) -> float:
    return mark_of(find_newest(run_folder)[0].part(0))


@contextmanager
def writers(run_folder: Path, num_ranks: int, keep: int = 2, token: str = "start") -> Iterator[list[CheckpointWriter]]:
    made = [CheckpointWriter(run_folder, keep, rank, num_ranks, token) for rank in range(num_ranks)]
    try:
        yield made
    finally:
        for writer in made:
            writer.close()


def write_together(ranks: list[CheckpointWriter], samples: int, mark: float = 1.0) -> None:
    for rank, writer in enumerate(ranks):
        writer.begin(state(mark + rank), samples)
    for writer in ranks:
        writer.wait()
    assert [writer.status for writer in ranks] == ["written"] * len(ranks)
    for writer in ranks:
        writer.conclude()
    ranks[0].wait()
    assert [writer.status for writer in ranks] == ["idle"] * len(ranks)


def discard_together(ranks: list[CheckpointWriter]) -> None:
    for writer in ranks:
        writer.discard()
    for writer in ranks:
        writer.wait()
        assert (writer.status, writer.error) == ("idle", None)
