"""The loop of plain PyTorch that the examples are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from crossbow_py import Result, Trainer

Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model on the samples with these numbers


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_samples: int, loss: Loss, epochs: int, batch_size: int = 16
) -> float:
    """Train a model, and return the seconds that it took. The model is left in evaluation mode."""
    begun = time.perf_counter()
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(num_samples).split(batch_size):
            optimizer.zero_grad()
            loss(model, chosen).backward()
            optimizer.step()
    model.eval()
    return time.perf_counter() - begun


def accuracy(scores: Tensor, classes: Tensor) -> float:
    return (scores.argmax(1) == classes).float().mean().item()


def spent(trainer: Trainer, result: Result) -> float:
    """Return the seconds that learners trained, and that choosing an executor took, but not those of evaluation."""
    return trainer.choices.executor_choice_s + result.summary.train_time_s


def show(what: str, *sides: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Print the score and the seconds of the plain loop and of the learners."""
    for name, (score, seconds) in zip(("plain loop", "learners"), sides, strict=True):
        print(f"{name}: {what} {score:.3f} after {seconds:.1f} s")
    return sides
