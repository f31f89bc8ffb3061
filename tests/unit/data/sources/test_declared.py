"""What sources say before they are read is what they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import num_samples
from crossbow_py.data.sources.base import Declared, SourceSettings
from crossbow_py.data.sources.cifar import Cifar10, Cifar100
from crossbow_py.data.sources.digits import Digits
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.sources.mnist import FashionMnist, Mnist
from crossbow_py.data.sources.synthetic import Synthetic


@pytest.mark.parametrize(
    "settings",
    [Digits(), Synthetic(shape=(2, 5, 7), num_classes=4, num_train=33, num_test=11),
     Synthetic(shape=(1, 2, 3, 4), num_train=20, num_test=10)],
    ids=["digits", "images", "clips"],
)  # fmt: skip
def test_declared_is_what_is_read(settings: SourceSettings) -> None:
    source = settings.load(progress=False)
    assert settings.declared() == Declared(
        source.input_shape, source.num_classes or 0, num_samples(source.train), num_samples(source.test), resident=True
    )


def test_declared_of_published_data_is_what_was_published(tmp_path: Path) -> None:
    nowhere = str(tmp_path)
    assert Cifar10(root=nowhere).declared() == Declared((3, 32, 32), 10, 50_000, 10_000, resident=True)
    assert Cifar100(root=nowhere).declared() == Declared((3, 32, 32), 100, 50_000, 10_000, resident=True)
    for digits in (Mnist(root=nowhere), FashionMnist(root=nowhere)):
        assert digits.declared() == Declared((1, 28, 28), 10, 60_000, 10_000, resident=True)


def test_declared_of_a_folder_counts_its_classes_and_images(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cow", ".hidden"):
        (tmp_path / "train" / name).mkdir(parents=True)
    for image in ("ant/1.jpg", "ant/2.jpg", "cow/1.png"):
        (tmp_path / "train" / image).touch()
    assert ImageFolder(folder=str(tmp_path), size=64).declared() == Declared((3, 64, 64), 3, 3, None, resident=False)


def test_declared_of_a_folder_with_many_images_does_not_count_them_all(tmp_path, monkeypatch) -> None:
    for image in range(4):
        (tmp_path / "train" / f"{image}").mkdir(parents=True)
        (tmp_path / "train" / f"{image}" / "1.jpg").touch()
    monkeypatch.setattr("crossbow_py.data.sources.image_folder._MOST_COUNTED", 3)
    assert ImageFolder(folder=str(tmp_path), size=64).declared() == Declared((3, 64, 64), 4, None, None, resident=False)


def test_declared_of_a_folder_without_classes_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="one folder a class"):
        ImageFolder(folder=str(tmp_path)).declared()


@pytest.mark.parametrize("folder", ["", "imagenet"])
def test_declared_of_a_folder_that_is_not_there_assumes_imagenet_and_says_so(folder: str, tmp_path: Path) -> None:
    found = ImageFolder(folder=folder, root=str(tmp_path)).declared()
    assert found is not None and (found.input_shape, found.num_classes) == ((3, 224, 224), 1000)
    assert found.note == f"data.folder={folder!r} is not there: 1000 classes are assumed, as in ImageNet."
