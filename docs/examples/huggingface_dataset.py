"""A data set in the style of Hugging Face `datasets`, whose items are dicts, in `Trainer` and in `data=custom`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from crossbow_py import SGD, Trainer
from crossbow_py.data.sources.digits import Digits


class Rows(Protocol):
    """What `datasets.load_dataset(...)["train"]` is: items are {"image": PIL image, "label": int}."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class Pairs(Dataset[tuple[Tensor, int]]):
    """The rows as (image, class). Images are uint8 [C, H, W]: scaled to [0, 1] where the learners are."""

    classes = tuple("0123456789")  # how many there are is taken from here

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        pixels = np.array(row["image"].convert("L"))  # [H, W]
        return torch.from_numpy(pixels).unsqueeze(0), row["label"]  # in colour: .convert("RGB"), .permute(2, 0, 1)


class DigitRows:
    """Stands in for `load_dataset`, so that there is nothing to download."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Image.fromarray(self.images[index, 0] * 15), "label": self.labels[index]}


def load() -> tuple[Pairs, Pairs]:
    """(train, test): what `data=custom data.target=huggingface_dataset.load` calls."""
    source = Digits().load(progress=False)
    return Pairs(DigitRows(*source.train)), Pairs(DigitRows(*source.test))


def in_memory(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """All items as two tensors, for a data set that the device's memory holds: nothing is decoded twice."""
    images, labels = zip(*(pairs[index] for index in range(len(pairs))), strict=True)
    return torch.stack(images), torch.tensor(labels)


def train(train_data: Any, test_data: Any) -> float:
    trainer = Trainer(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        train_data=train_data,
        test_data=test_data,
        num_classes=10,
        mean=(0.3,),  # of pixels in [0, 1], a value a channel
        std=(0.35,),
        optimizer=SGD(learning_rate=0.05),
        num_learners=2,
        executor="serial",
    )
    result = trainer.fit(max_epochs=3)
    assert result.test_accuracy is not None
    return result.test_accuracy


def main() -> tuple[float, float]:
    train_data, test_data = load()
    streamed = train(train_data, test_data)  # items made by worker processes while learners train
    resident = train(in_memory(train_data), in_memory(test_data))
    print(f"test accuracy: streamed {streamed:.3f}, in memory {resident:.3f}")
    return streamed, resident


if __name__ == "__main__":
    main()
