"""Tiny files in the published formats, written by hand."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(values: np.ndarray) -> bytes:
    """An IDX file of bytes."""
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(root: Path, folder: str = "mnist", packed: bool = True) -> dict[str, np.ndarray]:
    """Six training and three test images; returns the arrays by file name."""
    generator = np.random.default_rng(0)
    arrays = {}
    (root / folder).mkdir(parents=True)
    for name in MNIST_FILES:
        count, shape = (6 if name.startswith("train") else 3), ((28, 28) if "images" in name else ())
        arrays[name] = generator.integers(0, 256 if shape else 10, (count, *shape), dtype=np.uint8)
        content = idx(arrays[name])
        (root / folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


def cifar_batches(train: tuple[str, ...], test: str, labels: str, classes: int) -> dict[str, dict[bytes, object]]:
    """Two images a batch, with keys of bytes as Python 2 leaves them."""
    generator = np.random.default_rng(1)
    return {
        name: {
            b"data": generator.integers(0, 256, (2, 3072), dtype=np.uint8),
            labels.encode(): [int(label) for label in generator.integers(0, classes, 2)],
            b"filenames": [b"a.png", b"b.png"],
        }
        for name in (*train, test)
    }


def cifar10_batches() -> dict[str, dict[bytes, object]]:
    """All six."""
    return cifar_batches(tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels", 10)


def write_cifar(folder: Path, batches: dict[str, dict[bytes, object]], protocol: int = 2) -> None:
    """As a folder of pickles, of protocol 2 like the published ones."""
    folder.mkdir(parents=True)
    for name, batch in batches.items():
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))


def cifar_archive(folder: str, batches: dict[str, dict[bytes, object]]) -> bytes:
    """As a gzipped tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, batch in batches.items():
            content = pickle.dumps(batch, protocol=2)
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
