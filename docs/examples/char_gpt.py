"""A small GPT on bytes: the library of Python, or any text. Scores are [B, T, 256], and every token counts."""

from __future__ import annotations

from typing import Any

import plain_loop
import torch
from torch import Tensor, nn

from crossbow_py import AdamW, Trainer
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.data.sources.text import Text
from crossbow_py.models.gpt import GPT

CONTEXT = 128


def make_model() -> nn.Module:
    return GPT(depth=4, width=128, heads=4).build((CONTEXT,), 256)  # 0.84 million parameters


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def plain(train: Any, test: Any, epochs: float) -> tuple[float, float]:
    order = torch.randperm(len(train[1]))[: int(epochs * len(train[1]))]

    def loss(model: nn.Module, own: Tensor) -> Tensor:
        return token_loss(model(train[0][order[own]]), train[1][order[own]])

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.1)
    seconds = plain_loop.train(model, optimizer, len(order), loss, epochs=1)
    with torch.no_grad():
        return token_loss(model(test[0]), test[1]).item(), seconds


def learners(train: Any, test: Any, epochs: float, **options: Any) -> tuple[float, float]:
    trainer = Trainer(
        model=make_model, train_data=train, test_data=test, optimizer=AdamW(learning_rate=0.002, weight_decay=0.1),
        averaging=SynchronousSGD(), **options,
    )  # fmt: skip
    result = trainer.fit(max_epochs=epochs)
    print(generate(result.model, "def "))
    return result.summary.test_loss or 0.0, plain_loop.spent(trainer, result)


def generate(model: nn.Module, text: str, length: int = 200) -> str:
    """Continue a text, byte by byte, each drawn by the model's probabilities."""
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        for _ in range(length):
            scores = model(ids[:, -CONTEXT:])[0, -1]
            ids = torch.cat([ids, scores.softmax(-1).multinomial(1)[None]], 1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def main(file: str | None = None, epochs: float = 0.2, seed: int = 0, **options: Any) -> Any:
    text = Text(file=file, context=CONTEXT).load(progress=False)
    test = tuple(values[:256] for values in text.test)
    torch.manual_seed(seed)
    given = {"num_learners": 2, "batch_size": 8, "seed": seed, **options}  # two halves of the plain loop's batch
    return plain_loop.show("loss", plain(text.train, test, epochs), learners(text.train, test, epochs, **given))


if __name__ == "__main__":
    main()
