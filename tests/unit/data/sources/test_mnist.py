"""MNIST and Fashion-MNIST from IDX files, whole and damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.mnist import FashionMnist, Mnist, read_idx
from tests.unit.data.files import idx, write_mnist

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("settings", [Mnist, FashionMnist])
def test_load_of_local_files_gives_their_images(tmp_path: Path, settings: type[Mnist], packed: bool) -> None:
    arrays = write_mnist(tmp_path, settings.NAME, packed)
    source = settings(root=str(tmp_path), download=False).load(progress=False)
    assert source.train[0].dtype == torch.uint8
    assert source.train[1].dtype == torch.int64
    np.testing.assert_array_equal(source.train[0].numpy()[:, 0], arrays[IMAGES])
    assert source.test[1].tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert (source.num_classes, source.input_shape, source.name) == (10, (1, 28, 28), settings.NAME)
    assert source.augmentation.flip == (settings is FashionMnist)


@pytest.mark.parametrize("keep", [0, 5, 30, 500, -1, None])
def test_load_of_a_truncated_or_flipped_gzip_names_the_file(tmp_path: Path, keep: int | None) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes()[:keep])
    if keep is None:
        content[len(content) // 2] ^= 0x40
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=rf"{IMAGES}\.gz is truncated or damaged .*restore the published file"):
        Mnist(root=str(tmp_path)).load(progress=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, idx(np.zeros((6, 28, 28), np.uint8))[:-1], r"must hold \(6, 28, 28\) values, got 4703 in all"),
        (IMAGES, idx(np.zeros((6, 28, 28), np.uint8)) + b"x", r"got 4705 in all"),
        (IMAGES, idx(np.zeros(4704, np.uint8)), "must be an IDX file of bytes with 3 axes"),
        (IMAGES, idx(np.zeros((6, 27, 28), np.uint8)), r"n images 28 x 28 and n labels, got shapes \(6, 27, 28\)"),
        (IMAGES, idx(np.zeros((5, 28, 28), np.uint8)), r"got shapes \(5, 28, 28\) and \(6,\)"),
        (IMAGES, b"\0\0\x08\x03", r"truncated or damaged \(error: unpack_from requires"),
        (LABELS, idx(np.full(6, 10, np.uint8)), "labels from 0 to 9, got 10"),
    ],
)
def test_load_of_another_structure_names_the_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=message) as caught:
        Mnist(root=str(tmp_path)).load(progress=False)
    assert f"{name}.gz" in str(caught.value)


def test_read_idx_of_big_endian_lengths_gives_the_array(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(b"\x00\x00\x08\x02" + b"\x00\x00\x00\x02" + b"\x00\x00\x00\x03" + bytes(range(6)))
    assert read_idx(path, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
