"""A model of timm on photographs in folders: its new head learns ten times as fast as what was trained before."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import plain_loop
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from crossbow_py import SGD, Augmentation, Trainer
from crossbow_py.optimizers import ParameterGroup

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what the weights were trained with
Photographs = Dataset[tuple[Tensor, int]]


class Folder(Photographs):
    """Photographs in a folder for each class, as bytes [3, 96, 96]."""

    def __init__(self, root: Path, side: int = 96) -> None:
        self.classes = sorted(path.name for path in root.iterdir())
        self.files = sorted(root.glob("*/*"))
        self.targets = [self.classes.index(path.parent.name) for path in self.files]
        self.side = side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as image:
            pixels = np.array(image.convert("RGB").resize((self.side, self.side)))
        return torch.from_numpy(pixels).permute(2, 0, 1), self.targets[index]


def make_model(num_classes: int, pretrained: bool) -> nn.Module:
    return timm.create_model("resnet18", pretrained=pretrained, num_classes=num_classes)


def plain(train: Any, test: Any, epochs: int, pretrained: bool) -> tuple[float, float]:
    model = make_model(len(train.classes), pretrained)
    head = [*model.get_classifier().parameters()]
    rest = [own for own in model.parameters() if all(own is not each for each in head)]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": head, "lr": 0.05}], lr=0.005, momentum=0.9)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    begun = time.perf_counter()
    for _ in range(epochs):
        for images, classes in DataLoader(train, batch_size=16, shuffle=True, num_workers=2):
            flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images, images.flip(3))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model((flipped / 255 - mean) / std), classes).backward()
            optimizer.step()
    seconds = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        right = [
            plain_loop.accuracy(model((images / 255 - mean) / std), classes) * len(classes)
            for images, classes in DataLoader(test, batch_size=64)
        ]
    return sum(right) / len(test), seconds


def learners(train: Any, test: Any, epochs: int, pretrained: bool, **options: Any) -> tuple[float, float]:
    trainer = Trainer(
        model=lambda: make_model(len(train.classes), pretrained), train_data=train, test_data=test, mean=MEAN, std=STD,
        augmentation=Augmentation(flip=True),
        optimizer=SGD(learning_rate=0.005, groups=[ParameterGroup("fc", rate=10.0)]), **options,
    )  # fmt: skip
    result = trainer.fit(max_epochs=epochs)
    return result.test_accuracy or 0.0, plain_loop.spent(trainer, result)


def main(
    folder: str = "flowers_300", epochs: int = 4, pretrained: bool = True, seed: int = 0, **options: Any
) -> tuple[tuple[float, float], ...]:
    root = Path(os.environ.get("CROSSBOW_DATA_DIR", ".")) / folder  # has train/CLASS and val/CLASS
    data = Folder(root / "train"), Folder(root / "val")
    torch.manual_seed(seed)
    given = {"num_learners": 2, "seed": seed, **options}
    return plain_loop.show("accuracy", plain(*data, epochs, pretrained), learners(*data, epochs, pretrained, **given))


if __name__ == "__main__":
    main()
