"""A data root with a little of every data set, in the published formats: trains in seconds, without a network."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from tests.unit.data.files import MNIST_FILES, cifar_batches, idx, write_cifar
from tests.unit.data.images.pictures import write_part

_TRAIN, _TEST = 192, 48  # images


def write_data_root(root: Path) -> Path:
    """MNIST, Fashion-MNIST, CIFAR-10 and 100, and photographs as flowers_300; returns the root."""
    for folder in ("mnist", "fashion_mnist"):
        _write_mnist(root / folder)
    write_cifar(root / "cifar-10-batches-py", _cifar(tuple(f"data_batch_{n}" for n in range(1, 6)), "labels", 10))
    write_cifar(root / "cifar-100-python", _cifar(("train",), "fine_labels", 100))
    for part, per_class in (("train", 12), ("val", 4)):
        write_part(root / "flowers_300" / part, per_class)
    return root


def _write_mnist(folder: Path) -> None:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in MNIST_FILES:
        count = _TRAIN if name.startswith("train") else _TEST
        values = generator.integers(0, *((256, (count, 28, 28)) if "images" in name else (10, count)), dtype=np.uint8)
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))


def _cifar(train: tuple[str, ...], labels: str, classes: int) -> dict[str, dict[bytes, object]]:
    test = "test" if classes == 100 else "test_batch"
    batches = cifar_batches(train, test, labels, classes)
    generator = np.random.default_rng(2)
    for batch in batches.values():
        batch[b"data"] = generator.integers(0, 256, (_TEST, 3072), dtype=np.uint8)
        batch[labels.encode()] = [int(label) for label in generator.integers(0, classes, _TEST)]
    return batches
