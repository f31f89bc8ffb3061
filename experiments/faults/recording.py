"""Digits that carry their number, and a network that writes down which it was trained on, batch by batch.

Named on the command line as `data.target` and `model.target`, so that the trainer is the one everybody runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from crossbow_py.data.sources.digits import Digits

NUM_SAMPLES = Digits.NUM_TRAIN
_HIDDEN = 256  # as model=mlp
_RATE = 16.0  # the largest value of a pixel

Pair = tuple[Tensor, Tensor]


def numbered_digits() -> tuple[Pair, Pair]:
    """(train, test): a row a sample, its number first and then its pixels."""
    train, test = Digits().read(progress=False)
    assert isinstance(train, tuple), "digits are tensors"
    assert isinstance(test, tuple), "digits are tensors"
    return _numbered(*train), _numbered(*test)


def _numbered(images: Tensor, labels: Tensor) -> Pair:
    numbers = torch.arange(len(labels), dtype=torch.float32)[:, None]
    return torch.cat([numbers, images.flatten(1) / _RATE], dim=1), labels


class RecordingMLP(nn.Module):
    """Two hidden layers over the pixels; in training mode the numbers go to a file of this process in `folder`."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.layers = nn.Sequential(
            nn.Linear(64, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 10)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Classes of rows as `numbered_digits` makes them."""
        if self.training:
            _write(Path(self.folder), [int(number) for number in rows[:, 0].tolist()])
        output: Tensor = self.layers(rows[:, 1:])
        return output


def _write(folder: Path, numbers: Sequence[int]) -> None:
    """Append to this process's file, without a buffer, which a kill would take along."""
    path = folder / f"rank-{os.environ.get('RANK', '0')}.{os.getpid()}.jsonl"
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps([time.monotonic(), *numbers]).encode() + b"\n")


@dataclass(frozen=True)
class Recording:
    """The batches that one process was trained on.

    Attributes:
        rank, pid: the process.
        times_s: when each batch was, on the clock of the host.
        batches: numbers of samples, in the order of training.
    """

    rank: int
    pid: int
    times_s: tuple[float, ...]
    batches: tuple[tuple[int, ...], ...]


def read_recordings(folder: Path, batch_size: int) -> list[Recording]:
    """Read the recordings of all processes, the first to train first. Smaller batches were a look at the outputs."""
    found = []
    for path in folder.glob("rank-*.jsonl"):
        # The last line may be torn: its process was killed, and what it was about does not count.
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n")[:-1]]
        lines = [line for line in lines if len(line) == 1 + batch_size]
        rank, pid = path.name.removeprefix("rank-").split(".")[:2]
        if lines:
            times_s, batches = tuple(line[0] for line in lines), tuple(tuple(line[1:]) for line in lines)
            found.append(Recording(int(rank), int(pid), times_s, batches))
    return sorted(found, key=lambda recording: recording.times_s[0])


def starts_of(recordings: Sequence[Recording], num_ranks: int) -> list[dict[int, Recording]]:
    """Group recordings by start and rank: the n-th process of every rank belongs to the n-th start."""
    by_rank = [[each for each in recordings if each.rank == rank] for rank in range(num_ranks)]
    longest = max(map(len, by_rank), default=0)
    return [{rank: own[place] for rank, own in enumerate(by_rank) if place < len(own)} for place in range(longest)]


def counted_stream(
    starts: Sequence[Mapping[int, Recording]], begins: Sequence[int], end: int, num_ranks: int, num_learners: int
) -> list[int]:
    """Numbers of samples in the order of the stream, of what counts.

    A start counts from the checkpoint it went on from up to the one that the next went on from.

    Args:
        starts: of `starts_of`.
        begins: samples seen where each went on from.
        end: samples seen when the run ended.
        num_ranks, num_learners: learners of each rank, which take their turns in a round.
    """
    stream: list[int] = []
    for recordings, begin, until in zip(starts, begins, [*begins[1:], end], strict=True):
        position, place = begin, 0
        while position < until:
            for rank in range(num_ranks):
                for batch in recordings[rank].batches[place : place + num_learners]:
                    stream += batch
                    position += len(batch)
            place += num_learners
            assert place <= max(len(each.batches) for each in recordings.values()), "a checkpoint of untrained rounds"
    return stream


def lost_and_repeated(stream: Sequence[int], num_samples: int) -> tuple[int, int]:
    """Samples that are missing from an epoch that is complete, and those that are there again, over all epochs."""
    lost = repeated = 0
    for begin in range(0, len(stream) - num_samples + 1, num_samples):
        found = set(stream[begin : begin + num_samples])
        lost += num_samples - len(found & set(range(num_samples)))
        repeated += num_samples - len(found)
    return lost, repeated
