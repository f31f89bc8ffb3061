"""Which pixels are of a disc, of a square or of the ground. Targets are masks, which are flipped with their images."""

from __future__ import annotations

from typing import Any

import plain_loop
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Augmentation, Trainer

SIDE = 32
Pictures = tuple[Tensor, Tensor]


def pictures(count: int, seed: int) -> Pictures:
    """Grey images, bytes [N, 1, 32, 32], with a disc and a square, and masks [N, 32, 32] of the classes 0, 1 and 2."""
    draw = torch.Generator().manual_seed(seed)
    across = torch.arange(SIDE)
    rows, columns = across.view(1, -1, 1), across.view(1, 1, -1)
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for number in (1, 2):
        top, left = torch.randint(6, SIDE - 6, (2, count, 1, 1), generator=draw)
        size = torch.randint(3, 7, (count, 1, 1), generator=draw)
        down, right = (rows - top).abs(), (columns - left).abs()
        masks[down**2 + right**2 <= size**2 if number == 1 else torch.maximum(down, right) <= size] = number
    shade = torch.tensor([90, 150, 150])[masks] + 30 * torch.randn(masks.shape, generator=draw)
    return shade.clamp(0, 255).to(torch.uint8).unsqueeze(1), masks


class Segments(nn.Module):
    """Scores [B, 3, H, W] of the classes of all pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, dilation in ((1, 1), (width, 2), (width, 4), (width, 1)):
            own = nn.Conv2d(before, width, 3, padding=dilation, dilation=dilation, bias=False)
            layers += [own, nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def right_pixels(scores: Tensor, masks: Tensor) -> Tensor:
    return (scores.argmax(1) == masks).float().mean()


def plain(train: Pictures, test: Pictures, epochs: int) -> tuple[float, float]:
    def loss(model: nn.Module, own: Tensor) -> Tensor:
        images, masks, flipped = train[0][own] / 255, train[1][own], torch.rand(len(own)) < 0.5
        images[flipped], masks[flipped] = images[flipped].flip(3), masks[flipped].flip(2)
        return nn.functional.cross_entropy(model(images), masks)

    model = Segments()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seconds = plain_loop.train(model, optimizer, len(train[1]), loss, epochs)
    with torch.no_grad():
        return right_pixels(model(test[0] / 255), test[1]).item(), seconds


def learners(train: Pictures, test: Pictures, epochs: int, **options: Any) -> tuple[float, float]:
    trainer = Trainer(
        model=Segments, train_data=train, test_data=test, metrics={"right_pixels": right_pixels},
        augmentation=Augmentation(flip=True), optimizer=SGD(learning_rate=0.1, momentum=0.9), **options,
    )  # fmt: skip
    result = trainer.fit(max_epochs=epochs)
    return result.summary.metrics["right_pixels"], plain_loop.spent(trainer, result)


def main(count: int = 1000, epochs: int = 4, seed: int = 0, **options: Any) -> tuple[tuple[float, float], ...]:
    data = pictures(count, seed=1), pictures(200, seed=2)
    torch.manual_seed(seed)
    given = {"num_learners": 2, "seed": seed, **options}
    return plain_loop.show("pixels", plain(*data, epochs), learners(*data, epochs, **given))


if __name__ == "__main__":
    main()
