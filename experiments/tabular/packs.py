"""The side of crossbow_py: MLPs from one call of `train_many`, and the members that predict validation data best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossbow_py import AdamW, Member, train_many

Array = NDArray[Any]
_WAVES = 8  # of each number
_FASTER = 6  # than weights, as RealMLP has it: so soon does an input that is of no use become small


class Net(nn.Module):
    """An MLP on its inputs and on cosines of the first, with frequencies and a scale of each that it learns."""

    def __init__(self, numbers: int, inputs: int, outputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(2 * torch.randn(numbers, _WAVES))
        self.phases = nn.Parameter(math.pi * (2 * torch.rand(numbers, _WAVES) - 1))
        inputs += numbers * _WAVES
        self.scale = nn.Parameter(torch.full((inputs,), 1 / _FASTER))
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.cos(x[:, : len(self.frequencies), None] * self.frequencies + self.phases)
        out: Tensor = self.layers(torch.cat([waves.flatten(1), x], 1) * (_FASTER * self.scale))
        return out


def fit(data: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    torch.set_num_threads(options["threads"])
    has_classes, numbers = data["train_y"].dtype.kind == "i", data["train_num"].shape[1]
    parts = {part: (inputs(data, part), targets(data[f"{part}_y"])) for part in ("train", "validation", "test")}
    x, y = parts["train"]
    make = partial(Net, numbers, x.shape[1], y.shape[1], options["width"], 0.1 if has_classes else 0.0)
    results = train_many(
        make, parts["train"], validation_data=parts["validation"], members=members(options["models"], options["seed"]),
        loss=nn.CrossEntropyLoss() if has_classes else nn.MSELoss(), batch_size=128, max_epochs=options["epochs"],
        schedule="cosine", restore_best=True, precision="fp32", device="cpu",
    )  # fmt: skip
    with torch.no_grad():
        found = torch.stack([own.model(parts["test"][0]) for own in results.selected(32)])
    mean: Array = (found.softmax(-1).mean(0) if has_classes else found.mean(0)[:, 0]).numpy()
    return mean


def members(number: int, seed: int) -> list[Member]:
    """Return members of other seeds, learning rates and weight decays; a single one has the middle of both ranges."""
    drawn = np.random.default_rng(seed).uniform(size=(number, 2)) if number > 1 else np.full((1, 2), 0.5)
    return [
        Member(seed=1000 * seed + n, optimizer=AdamW(learning_rate=0.003 * 3.3**rate, weight_decay=0.001 * 100**decay))
        for n, (rate, decay) in enumerate(drawn)
    ]


def inputs(data: Mapping[str, Array], part: str) -> Tensor:
    """Return quantiles, categories, and quantiles piece by piece: how far each has come through each of 32 bins."""
    edges = torch.special.ndtri(torch.linspace(0.001, 0.999, 33))
    num = torch.from_numpy(data[f"{part}_num"])[..., None]
    pieces = ((num - edges[:-1]) / (edges[1:] - edges[:-1])).clamp(0, 1)
    return torch.cat([torch.from_numpy(data[f"{part}_x"]), pieces.flatten(1)], 1)


def targets(y: Array) -> Tensor:
    """Return values [N, 1], or probabilities of classes [N, classes]: then the best epoch is that of the least loss."""
    given = torch.from_numpy(y)
    return nn.functional.one_hot(given).float() if y.dtype.kind == "i" else given[:, None]
