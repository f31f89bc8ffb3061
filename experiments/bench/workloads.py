"""Workloads: a model, and images of the data set it is made for, real where they are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import as_pair
from crossbow_py.data.sources import DataSource, SourceSettings
from crossbow_py.data.sources.cifar import Cifar10
from crossbow_py.data.sources.mnist import Mnist
from crossbow_py.data.sources.synthetic import Synthetic
from crossbow_py.models import MODELS

# Every side keeps its own padded copy of the images, so no more of them than an epoch of several seconds needs.
NUM_IMAGES = 25_000
# 154 MB in every process. Epochs are short so, but without tests and checkpoints their ends are hardly a pause.
NUM_LARGE_IMAGES = 1024
LARGE = Synthetic(shape=(3, 224, 224), num_classes=1000, num_test=1, flip=True)
_CIFAR = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "vgg16")
_MNIST = ("lenet", "mlp")
_LARGE = ("resnet50",)
WORKLOAD_MODELS = (*_CIFAR, *_MNIST, *_LARGE)
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


@dataclass(frozen=True)
class Effort:
    """The effort a side may make to find what suits it, before its first window.

    `tuned_single` tries each of its forms for `trial_s`, `trials` times while all of it took less than `trials_limit_s`
    (the first time is always whole). The auto side is measured as it is after `tuning_s` of tuning, its choice of an
    executor included.
    """

    trial_s: float = 0.4
    trials: int = 3
    trials_limit_s: float = 60.0
    tuning_s: float = 120.0


@dataclass(frozen=True)
class Workload:
    """Plain values and paths, so that it can be sent to another process; the images lie in .npy files."""

    model: str
    batch_size: int
    device: str
    data: str
    images_path: Path
    labels_path: Path
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation

    def tensors(self) -> tuple[Tensor, Tensor]:
        """uint8 images [N, C, H, W] and int64 labels [N], mapped, so that processes share their memory."""
        return tuple(torch.from_numpy(np.load(path, mmap_mode="c")) for path in (self.images_path, self.labels_path))  # type: ignore[return-value]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = np.load(self.images_path, mmap_mode="r").shape[1:]
        return channels, height, width

    def make_model(self) -> nn.Module:
        return MODELS[self.model]().build(self.image_shape, self.num_classes)


def prepare(model: str, batch_size: int, device: str, folder: Path) -> Workload:
    """Load the images (once, for all sides) and leave them under `folder`."""
    return prepare_all([model], batch_size, device, folder)[model]


def prepare_all(models: Sequence[str], batch_size: int, device: str, folder: Path) -> dict[str, Workload]:
    """The same for several models, those of one data set sharing its images."""
    by_data: dict[str, Workload] = {}
    for model in models:
        data = _data_of(model)
        if data not in by_data:
            by_data[data] = _prepare(model, batch_size, device, folder / data)
    return {model: replace(by_data[_data_of(model)], model=model) for model in models}


def _data_of(model: str) -> str:
    if model in _LARGE:
        return "large"
    return "cifar10" if model in _CIFAR else "mnist"


def _prepare(model: str, batch_size: int, device: str, folder: Path) -> Workload:
    source = load_source(model)
    pair = as_pair(source.train)
    assert pair is not None, "published data sets are pairs of tensors"
    assert source.num_classes is not None, "published data sets have classes"
    assert source.mean is not None, "published data sets have moments"
    assert source.std is not None, "published data sets have moments"
    folder.mkdir()
    paths = folder / "images.npy", folder / "labels.npy"
    for path, tensor in zip(paths, pair, strict=True):
        np.save(path, tensor[:NUM_IMAGES].numpy())
    return Workload(
        model=model,
        batch_size=batch_size,
        device=device,
        data=source.name,
        images_path=paths[0],
        labels_path=paths[1],
        num_classes=source.num_classes,
        mean=source.mean,
        std=source.std,
        augmentation=source.augmentation,
    )


def load_source(model: str) -> DataSource:
    """CIFAR-10 or MNIST when they are here and whole, else synthetic images of their shape and augmentation.

    Images of 224 pixels and 1000 classes are always synthetic, and few.
    """
    if model in _LARGE:
        return replace(replace(LARGE, num_train=NUM_LARGE_IMAGES).load(progress=False), name="synthetic 224 px")
    published: SourceSettings = Cifar10(download=False) if model in _CIFAR else Mnist(download=False)
    try:
        return published.load(progress=False)
    except UserError as error:
        print(f"synthetic images instead of {published.NAME}: {error}", flush=True)
    shape = (3, 32, 32) if model in _CIFAR else (1, 28, 28)
    synthetic = Synthetic(
        shape=shape, num_train=NUM_IMAGES, num_test=1, crop_padding=published.crop_padding, flip=published.flip
    )
    return synthetic.load(progress=False)
