"""Columns of categories and of numbers, to a class: an embedding for each category, then a perceptron."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import plain_loop
from crossbow_py import AdamW, Trainer

CATEGORIES = (7, 12, 24)  # of weekday, month and hour
Rows = tuple[dict[str, Tensor], Tensor]


def rows(count: int, seed: int) -> Rows:
    """Days on which bicycles are hired or not: by rush hours, the season and the weather, and by chance."""
    draw = torch.Generator().manual_seed(seed)
    categories = torch.stack([torch.randint(number, (count,), generator=draw) for number in CATEGORIES], 1)
    numbers = torch.randn(count, 4, generator=draw)  # temperature, rain, wind, and one that says nothing
    weekday, month, hour = categories.unbind(1)
    rush = (weekday < 5) & ((hour - 8).abs().le(1) | (hour - 17).abs().le(1))
    summer = (month - 6).abs() < 3
    liking = 3 * rush + 2 * summer * (hour > 9) + numbers[:, 0] - 2 * numbers[:, 1].relu() - 1.5
    hired = torch.rand(count, generator=draw) < (2 * liking).sigmoid()
    return {"categories": categories, "numbers": numbers}, hired.long()


class Tabular(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(number, 8) for number in CATEGORIES)
        self.rest = nn.Sequential(nn.Linear(28, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        each = [own(column) for own, column in zip(self.embeddings, categories.unbind(1), strict=True)]
        return self.rest(torch.cat([*each, numbers], 1))


def plain(train: Rows, test: Rows, epochs: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Tabular()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    return plain_loop.train(model, optimizer, train, test, nn.functional.cross_entropy, plain_loop.accuracy, epochs)


def learners(train: Rows, test: Rows, epochs: int, **options: Any) -> tuple[float | None, float]:
    options = {"num_learners": 4, **options}
    trainer = Trainer(model=Tabular, train_data=train, test_data=test, optimizer=AdamW(learning_rate=0.002), **options)
    result = trainer.fit(max_epochs=epochs)
    return result.test_accuracy, result.summary.train_time_s


def main(count: int = 20_000, epochs: int = 5) -> list[tuple[float | None, float]]:
    data = rows(count, seed=1), rows(5000, seed=2)
    found = [plain(*data, epochs), learners(*data, epochs)]
    for name, (accuracy, seconds) in zip(("plain loop", "learners"), found, strict=True):
        print(f"{name}: test accuracy {accuracy:.3f} in {seconds:.1f} s of training")
    return found


if __name__ == "__main__":
    main()
