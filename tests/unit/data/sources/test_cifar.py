"""CIFAR from folders and archives, whole and damaged."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.cifar import Cifar10, Cifar100, PublishedBatch
from tests.unit.data.files import cifar10_batches, cifar_archive, cifar_batches, write_cifar


def settings(root: Path) -> Cifar10:
    return Cifar10(root=str(root), download=False)


def expect_batches(source_images: torch.Tensor, source_labels: torch.Tensor, batches: list[dict]) -> None:
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    assert source_images.dtype == torch.uint8
    assert source_labels.dtype == torch.int64
    np.testing.assert_array_equal(source_images.numpy(), images)
    assert source_labels.tolist() == [label for batch in batches for label in batch[b"labels"]]


@pytest.mark.parametrize("archived", [True, False])
def test_load_of_a_folder_or_an_archive_gives_its_images(tmp_path: Path, archived: bool) -> None:
    batches = cifar10_batches()
    if archived:
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(cifar_archive("cifar-10-batches-py", batches))
    else:
        write_cifar(tmp_path / "cifar-10-batches-py", batches)
    source = settings(tmp_path).load(progress=False)
    expect_batches(*source.train, [batches[f"data_batch_{i}"] for i in range(1, 6)])
    expect_batches(*source.test, [batches["test_batch"]])
    assert (source.name, source.num_classes, source.input_shape) == ("cifar10", 10, (3, 32, 32))
    assert source.validation is None
    assert (source.augmentation.crop_padding, source.augmentation.flip) == (4, True)


def test_load_of_cifar100_gives_the_fine_labels(tmp_path: Path) -> None:
    batches = cifar_batches(("train",), "test", "fine_labels", 100)
    write_cifar(tmp_path / "cifar-100-python", batches)
    source = Cifar100(root=str(tmp_path), download=False).load(progress=False)
    assert source.train[1].tolist() == batches["train"][b"fine_labels"]
    assert source.num_classes == 100


@pytest.mark.parametrize("protocol", [2, 5])
def test_load_of_pickles_written_anew_with_text_keys_is_accepted(tmp_path: Path, protocol: int) -> None:
    batches = cifar10_batches()
    write_cifar(tmp_path / "cifar-10-batches-py", batches)
    for name, batch in batches.items():
        content = pickle.dumps({key.decode(): value for key, value in batch.items()}, protocol=protocol)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    expect_batches(*settings(tmp_path).load(progress=False).test, [batches["test_batch"]])


def test_load_of_an_archive_lacking_a_member_names_it(tmp_path: Path) -> None:
    batches = cifar10_batches()
    del batches["test_batch"]
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(cifar_archive("cifar-10-batches-py", batches))
    with pytest.raises(UserError, match=r"cifar-10-batches-py/test_batch is missing in .*cifar-10-python\.tar\.gz"):
        settings(tmp_path).load(progress=False)


@pytest.mark.parametrize("keep", [0, 1000])
def test_load_of_a_truncated_batch_names_the_file(tmp_path: Path, keep: int) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", cifar10_batches())
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"data_batch_2 is (truncated or damaged \(\w+\); restore|refused: .*take)"):
        settings(tmp_path).load(progress=False)


@pytest.mark.parametrize("damage", ["cut", "flip", "text"])
def test_load_of_a_damaged_archive_names_the_file(tmp_path: Path, damage: str) -> None:
    content = cifar_archive("cifar-10-batches-py", cifar10_batches())
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "text": b"404 Not Found",
    }
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(damaged[damage])
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz is truncated or damaged"):
        settings(tmp_path).load(progress=False)


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.zeros((0, 3072), np.uint8), b"labels": []},
    ],
)
def test_load_of_another_structure_names_the_file_and_what_it_must_hold(tmp_path: Path, batch: object) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", {**cifar10_batches(), "data_batch_1": batch}, protocol=4)
    with pytest.raises(UserError, match=r"data_batch_1 must hold 'data' uint8 \[n, 3072\]"):
        settings(tmp_path).load(progress=False)


def test_load_of_a_file_of_the_published_length_and_another_md5_is_refused(tmp_path, monkeypatch) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", cifar10_batches())
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    content = path.read_bytes()
    md5 = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(Cifar10, "TEST", (PublishedBatch("test_batch", len(content), md5),))
    settings(tmp_path).load(progress=False)
    pixel = len(content) // 2
    path.write_bytes(content[:pixel] + bytes([content[pixel] ^ 1]) + content[pixel + 1 :])
    with pytest.raises(UserError, match=rf"test_batch is damaged: its md5 is \w+, published is {md5}"):
        settings(tmp_path).load(progress=False)


@pytest.mark.parametrize(("is_folder", "message"), [(False, "missing; restore"), (True, "cannot be read")])
def test_load_of_a_batch_that_is_missing_or_a_folder_names_it(tmp_path: Path, is_folder: bool, message: str) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", cifar10_batches())
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").unlink()
    if is_folder:
        (tmp_path / "cifar-10-batches-py" / "data_batch_5").mkdir()
    with pytest.raises(UserError, match=rf"cifar-10-batches-py/data_batch_5 .*{message}"):
        settings(tmp_path).load(progress=False)
