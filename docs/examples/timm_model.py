"""A model factory in the style of timm, `create_model(name, num_classes=..., in_chans=...)`, in `Trainer`."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.data.sources.digits import Digits


class TinyNet(nn.Module):
    """Two convolutions and a classifier on the mean over all places."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_chans, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


def create_model(model_name: str, num_classes: int = 1000, in_chans: int = 3, **settings: int) -> nn.Module:
    """Stands in for `timm.create_model`: `model=custom model.target=timm_model.create_model` calls it."""
    return {"tiny": TinyNet}[model_name](num_classes, in_chans, **settings)


def main() -> float:
    digits = Digits().load(progress=False)
    trainer = Trainer(
        model=partial(create_model, "tiny", num_classes=10, in_chans=1),
        names={"model": "tiny"},  # in records; a partial has no name
        train_data=digits.train,
        test_data=digits.test,
        num_classes=10,
        mean=digits.mean,
        std=digits.std,
        optimizer=SGD(learning_rate=0.1, weight_decay=5e-4),
        num_learners=2,
    )
    result = trainer.fit(max_epochs=3)
    print(f"test accuracy of {result.summary.model}: {result.test_accuracy:.3f}")
    assert result.test_accuracy is not None
    return result.test_accuracy


if __name__ == "__main__":
    main()
