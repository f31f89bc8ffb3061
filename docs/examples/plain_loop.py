"""The loop of plain PyTorch that the examples are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Score = Callable[[Any, Tensor], float]  # of a model's output on all test samples, and their targets


def accuracy(scores: Tensor, targets: Tensor) -> float:
    return (scores.argmax(1) == targets).float().mean().item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Any, Tensor], test: tuple[Any, Tensor],
    loss: Callable[[Any, Tensor], Tensor], score: Score, epochs: int, batch_size: int = 16,
) -> tuple[float, float]:  # fmt: skip
    """Train on tensors, or dicts of them, and return the score on the test data and the seconds of training."""
    (inputs, targets), begun = data, time.perf_counter()
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(len(targets)).split(batch_size):
            optimizer.zero_grad()
            loss(_call(model, inputs, chosen), targets[chosen]).backward()
            optimizer.step()
    seconds = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        return score(_call(model, test[0], torch.arange(len(test[1]))), test[1]), seconds


def _call(model: nn.Module, inputs: Any, chosen: Tensor) -> Any:
    if isinstance(inputs, dict):
        return model(**{name: values[chosen] for name, values in inputs.items()})
    return model(inputs[chosen])
