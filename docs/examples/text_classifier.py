"""Sentences as tokens: an embedding, a convolution over words, two classes. No images, and nothing to download."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from crossbow_py import AdamW, Trainer

PAD = 0
GOOD, BAD = ["good", "great", "lovely", "clever"], ["bad", "dull", "awful", "silly"]
OTHERS = ["the", "film", "was", "and", "we", "saw", "it", "with", "friends", "yesterday", "very", "long"]
IDS = {word: number for number, word in enumerate(["not", *GOOD, *BAD, *OTHERS], start=1)}  # 0 is padding
LONGEST = 8


def encode(sentences: list[str]) -> Tensor:
    """Tokens int64 [N, LONGEST], padded at the end."""
    rows = [[IDS[word] for word in sentence.split()] for sentence in sentences]
    return torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in rows])


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sentences with one opinion, in every other one with `not` before it; the class is whether it is a good one."""
    draw, sentences, classes = random.Random(seed), [], []
    for _ in range(count):
        is_good, negated = draw.random() < 0.5, draw.random() < 0.5
        words = draw.choices(OTHERS, k=draw.randint(2, LONGEST - 2))
        opinion = ["not"] * negated + [draw.choice(GOOD if is_good else BAD)]
        place = draw.randint(0, len(words))
        sentences.append(" ".join(words[:place] + opinion + words[place:]))
        classes.append(int(is_good != negated))
    return encode(sentences), torch.tensor(classes)


class Classifier(nn.Module):
    """Tokens [B, L] to logits [B, 2]. The mask is made here: a model takes one tensor."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(IDS) + 1, width, padding_idx=PAD)
        self.pairs = nn.Conv1d(width, width, kernel_size=2, padding=1)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.pairs(self.embedding(tokens).transpose(1, 2)).relu()[..., : tokens.shape[1]]
        return self.head((hidden * (tokens != PAD).unsqueeze(1)).amax(2))


def main() -> tuple[float, list[int]]:
    trainer = Trainer(
        model=Classifier,
        train_data=make_data(1500, seed=1),
        test_data=make_data(500, seed=2),
        num_classes=2,
        batch_size=32,
        optimizer=AdamW(learning_rate=0.003),
        num_learners=2,
        executor="serial",
    )
    result = trainer.fit(max_epochs=4)
    assert result.test_accuracy is not None
    sentences = ["the film was very good", "the film was not good", "it was not bad"]
    with torch.no_grad():
        predicted = result.model(encode(sentences)).argmax(1).tolist()
    print(f"test accuracy {result.test_accuracy:.3f}")
    for sentence, is_good in zip(sentences, predicted, strict=True):
        print(f"{sentence}: {'good' if is_good else 'bad'}")
    return result.test_accuracy, predicted


if __name__ == "__main__":
    main()
