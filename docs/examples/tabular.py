"""Columns of categories and numbers, to a class: an embedding for each category, then a perceptron."""

from __future__ import annotations

from typing import Any

import plain_loop
import torch
from torch import Tensor, nn

from crossbow_py import AdamW, Trainer

CATEGORIES = (7, 12, 24)  # weekdays, months, hours
Rows = tuple[dict[str, Tensor], Tensor]


def rows(count: int, seed: int) -> Rows:
    """Hours in which bicycles are hired or not: by rush hour, season and weather, and by chance."""
    draw = torch.Generator().manual_seed(seed)
    categories = torch.stack([torch.randint(number, (count,), generator=draw) for number in CATEGORIES], 1)
    numbers = torch.randn(count, 4, generator=draw)  # temperature, rain, wind, and one that says nothing
    weekday, month, hour = categories.unbind(1)
    rush = (weekday < 5) & (((hour - 8).abs() < 2) | ((hour - 17).abs() < 2))
    summer = ((month - 6).abs() < 3) & (hour > 9)
    liking = 3 * rush + 2 * summer + numbers[:, 0] - 2 * numbers[:, 1].relu() - 1.5
    hired = torch.rand(count, generator=draw) < (2 * liking).sigmoid()
    return {"categories": categories, "numbers": numbers}, hired.long()


class Tabular(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(number, 8) for number in CATEGORIES)
        inner = [nn.Linear(28, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.rest = nn.Sequential(*inner, nn.Linear(width, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        each = [own(column) for own, column in zip(self.columns, categories.unbind(1), strict=True)]
        return self.rest(torch.cat([*each, numbers], 1))


def plain(train: Rows, test: Rows, epochs: int) -> tuple[float, float]:
    def loss(model: nn.Module, own: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(**{key: v[own] for key, v in train[0].items()}), train[1][own])

    model = Tabular()
    seconds = plain_loop.train(model, torch.optim.AdamW(model.parameters(), 0.002), len(train[1]), loss, epochs)
    with torch.no_grad():
        return plain_loop.accuracy(model(**test[0]), test[1]), seconds


def learners(train: Rows, test: Rows, epochs: int, **options: Any) -> tuple[float, float]:
    trainer = Trainer(model=Tabular, train_data=train, test_data=test, optimizer=AdamW(learning_rate=0.002), **options)
    result = trainer.fit(max_epochs=epochs)
    return result.test_accuracy or 0.0, plain_loop.spent(trainer, result)


def main(count: int = 20_000, epochs: int = 5, seed: int = 0, **options: Any) -> tuple[tuple[float, float], ...]:
    data = rows(count, seed=1), rows(5000, seed=2)
    torch.manual_seed(seed)
    given = {"num_learners": 4, "seed": seed, **options}
    return plain_loop.show("accuracy", plain(*data, epochs), learners(*data, epochs, **given))


if __name__ == "__main__":
    main()
