"""A small BERT of transformers that learns which opinions are good ones, on what a tokenizer returns."""

from __future__ import annotations

import random
from typing import Any

import plain_loop
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from crossbow_py import AdamW, Trainer

GOOD, BAD = ["good", "great", "lovely", "clever"], ["bad", "dull", "awful", "silly"]
OTHERS = ["the", "film", "was", "and", "we", "saw", "it", "with", "friends", "yesterday", "very", "long"]
IDS = {word: number for number, word in enumerate(["[PAD]", "not", *GOOD, *BAD, *OTHERS])}
LONGEST = 10


def tokenized(sentences: list[str]) -> dict[str, Tensor]:
    """What a tokenizer gives: ids padded with 0, and a mask."""
    ids = torch.zeros(len(sentences), LONGEST, dtype=torch.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence.split())] = torch.tensor([IDS[word] for word in sentence.split()])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def rows(count: int, seed: int) -> dict[str, Tensor]:
    """Sentences with an opinion, half of them with `not` before it: `dataset.with_format("torch")[:]` looks so too."""
    draw, sentences, labels = random.Random(seed), [], []
    for _ in range(count):
        is_good, negated = draw.random() < 0.5, draw.random() < 0.5
        words = draw.choices(OTHERS, k=draw.randint(2, LONGEST - 2))
        place = draw.randint(0, len(words))
        opinion = ["not"] * negated + [draw.choice(GOOD if is_good else BAD)]
        sentences.append(" ".join(words[:place] + opinion + words[place:]))
        labels.append(int(is_good != negated))
    return {**tokenized(sentences), "labels": torch.tensor(labels)}


def make_model() -> nn.Module:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=len(IDS), max_position_embeddings=LONGEST, **size))


def plain(train: dict[str, Tensor], test: dict[str, Tensor], epochs: int) -> tuple[float, float]:
    def loss(model: nn.Module, own: Tensor) -> Tensor:
        return model(**{key: values[own] for key, values in train.items()}).loss

    model, count = make_model(), len(train["labels"])
    seconds = plain_loop.train(model, torch.optim.AdamW(model.parameters(), 0.002), count, loss, epochs)
    with torch.no_grad():
        return plain_loop.accuracy(model(**test).logits, test["labels"]), seconds


def learners(train: dict[str, Tensor], test: dict[str, Tensor], epochs: int, **options: Any) -> tuple[float, float]:
    optimizer = AdamW(learning_rate=0.002)
    trainer = Trainer(model=make_model, train_data=train, test_data=test, optimizer=optimizer, **options)
    result = trainer.fit(max_epochs=epochs)
    return result.test_accuracy or 0.0, plain_loop.spent(trainer, result)


def main(count: int = 4000, epochs: int = 4, seed: int = 0, **options: Any) -> tuple[tuple[float, float], ...]:
    data = rows(count, seed=1), rows(1000, seed=2)
    torch.manual_seed(seed)
    given = {"num_learners": 4, "seed": seed, **options}
    return plain_loop.show("accuracy", plain(*data, epochs), learners(*data, epochs, **given))


if __name__ == "__main__":
    main()
