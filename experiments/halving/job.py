"""The search that all sides are given: its network, its training loop, and the file where they note values.

Programs of other sides run in an environment of their own (`experiments/bench/environments.py`), without crossbow_py.
They take the folder of the job, which `run.py` writes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

JOB, VALUES = "job.pt", "values.jsonl"


class MLP(nn.Module):
    """The network of all sides."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


@cache
def read(folder: str) -> Mapping[str, Any]:
    """Return the job as a process reads it, once; images are mapped, so that processes share their memory."""
    job: Mapping[str, Any] = torch.load(Path(folder) / JOB, mmap=True, weights_only=False)
    return job


def measured(folder: str, epochs: int, model: nn.Module) -> float:
    """Return a model's validation accuracy, and note it; at the last rung with its test accuracy."""
    job, value = read(folder), accuracy(model, folder, "validation")
    test = accuracy(model, folder, "test") if epochs == job["rungs"][-1] else None
    with (Path(folder) / VALUES).open("a") as file:
        file.write(json.dumps({"at": time.time(), "epochs": epochs, "value": value, "test": test}) + "\n")
    return value


@torch.no_grad()
def accuracy(model: nn.Module, folder: str, part: str) -> float:
    x, y = read(folder)[part]
    return round(float((model.eval()(x).argmax(1) == y).double().mean()), 4)


def trained(folder: str, number: int) -> Iterator[tuple[int, float]]:
    """Train a configuration by PyTorch's default loop; yields epochs and validation accuracy, rung by rung."""
    job = read(folder)
    config, (x, y) = job["configurations"][number], job["train"]
    rate, momentum, decay = (config[f"optimizer.{name}"] for name in ("learning_rate", "momentum", "weight_decay"))
    torch.manual_seed(job["seed"] + number)
    model, criterion = MLP(config["model.dropout"]), nn.CrossEntropyLoss(label_smoothing=config["label_smoothing"])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    for epoch in range(1, job["rungs"][-1] + 1):
        model.train()
        for ids in torch.split(torch.randperm(len(y)), job["batch_size"]):
            optimizer.zero_grad()
            criterion(model(x[ids]), y[ids]).backward()
            optimizer.step()
        if epoch in job["rungs"]:
            yield epoch, measured(folder, epoch, model)


def prepare(seed: int, *_imported: object) -> None:
    """Prepare a process that is kept: what it is given is imported when it is unpickled."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()  # which imports more
    time.sleep(2)  # until every process has one of these


def report(search: Callable[[str], tuple[float, float]]) -> None:
    """Print the seconds of a search, without imports, and when it began, in JSON."""
    seconds, begun = search(sys.argv[1])
    print(json.dumps({"seconds": seconds, "begun": begun}))
