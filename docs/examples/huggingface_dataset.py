"""A data set of Hugging Face, made here and saved to disk, in `data=huggingface` and in `Trainer`."""

from __future__ import annotations

from typing import Any

import datasets
from PIL import Image
from torch import nn

from crossbow_py import SGD, Trainer
from crossbow_py.data.sources.digits import Digits
from crossbow_py.data.sources.huggingface import HuggingFace


def save(path: str = "digits_saved") -> None:
    """Stands in for `load_dataset("mnist")`, so that there is nothing to download."""
    source = Digits().load(progress=False)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)])}
    )
    splits = {}
    for split, (images, labels) in {"train": source.train, "test": source.test}.items():
        rows = {"image": [Image.fromarray(own[0].numpy() * 15) for own in images], "label": labels.tolist()}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(splits).save_to_disk(path)


def train(path: str, **settings: Any) -> float:
    data = HuggingFace(path=path, **settings).load(progress=False)  # or path="mnist", from the hub
    trainer = Trainer(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        train_data=data.train,  # images are decoded by worker processes while learners train
        test_data=data.test,
        num_classes=data.num_classes,
        class_names=data.class_names,
        mean=data.mean,
        std=data.std,
        optimizer=SGD(learning_rate=0.05),
        num_learners=2,
    )
    result = trainer.fit(max_epochs=3)
    assert result.test_accuracy is not None
    return result.test_accuracy


def main() -> float:
    save()
    accuracy = train("digits_saved", mean=(0.3,), std=(0.35,))  # of pixels in [0, 1], a value a channel
    print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
