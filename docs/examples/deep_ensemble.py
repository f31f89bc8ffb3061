"""A deep ensemble for regression: 16 models that say how sure they are, trained in one call, against one of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from crossbow_py import AdamW, train_many


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A wave in two of six columns whose noise grows with the third."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    noise = 0.1 + 0.3 * x[:, 2].sigmoid()
    return x, ((2 * x[:, 0]).sin() + 0.5 * x[:, 1] + noise * torch.randn(count, generator=draw))[:, None]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


def nll(outputs: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of y under a normal distribution of this mean and log variance."""
    mean, log_variance = outputs.float().split(1, 1)
    return 0.5 * (log_variance + (y - mean) ** 2 / log_variance.exp() + math.log(2 * math.pi)).mean()


def main(count: int = 1000, epochs: int = 60, num_models: int = 16) -> tuple[float, float]:
    train, test = samples(count, seed=1), samples(2000, seed=2)
    options = {"optimizer": AdamW(learning_rate=0.003), "batch_size": 32, "max_epochs": epochs}
    results = train_many(model, train, test, members=num_models, loss=nll, **options)
    with torch.no_grad():
        mean, variance = torch.stack([own(test[0]) for own in results.models]).split(1, 2)
    variance = variance.exp().mean(0) + mean.var(0, unbiased=False)  # noise, and what models do not agree on
    together = float(nll(torch.cat([mean.mean(0), variance.log()], 1), test[1]))
    return results.summary()["test_loss"].mean, together


if __name__ == "__main__":
    one, together = main()
    print(f"negative log-likelihood: one model {one:.3f}, the ensemble {together:.3f}")
