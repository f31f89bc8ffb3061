"""Images that workers transform: for training and evaluation, for every kind of data, and what is said of mistakes."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from crossbow_py.core.errors import BadDataError, UserError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.datasets import Collated, class_labels
from crossbow_py.data.images.transforms import Transforms, rand_augment_of, transform_of
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.sources.custom import Custom
from crossbow_py.data.sources.digits import Digits
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.streaming.items import seed_generators
from crossbow_py.data.streaming.streamed_data import Key
from crossbow_py.data.streaming.transformed import TransformedData, transformed
from tests.unit.data.images.pictures import write_part

SEED, N = 5, 12
MODULE = """
import random
import numpy, torch
from PIL import Image

class Drawn:
    '''A tensor of what the three generators draw, in the shape of an image.'''
    def __init__(self, size=4): self.size = size
    def __call__(self, image):
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
        return torch.tensor(drawn).view(3, 1, 1).expand(3, self.size, self.size).contiguous()

def dark(size=4): return lambda image: torch.full((3, size, size), 9, dtype=torch.uint8)
def smaller(size=8): return lambda image: image.resize((size, size))
def of_image(width=5):
    def crop(image):
        assert isinstance(image, Image.Image), type(image)
        return torch.from_numpy(numpy.array(image)[:width, :width].copy()).permute(2, 0, 1)
    return crop
def values(): return lambda image: image.float() / 255
def inverted(): return lambda image: 255 - image
def uneven(): return lambda image: torch.zeros(3, 4, 4 + int(image[0, 0, 0] == 7), dtype=torch.uint8)
def flat(): return lambda image: torch.zeros(4, 4)
def failing(): return lambda image: 1 / 0
def number(): return 3

class Pictures:
    classes = ("a", "b", "c")
    def __init__(self, sizes): self.sizes = sizes
    def __len__(self): return len(self.sizes)
    def __getitem__(self, index): return Image.new("RGB", (self.sizes[index], 6), (index, 0, 0)), index % 3
def pictures(sizes=(6, 6, 6, 6)): return Pictures(sizes), Pictures(sizes)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_transforms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("users_transforms", None)


def target(name: str, **given: Any) -> dict[str, Any]:
    return {"target": f"users_transforms.{name}", **given}


class Items:
    """Image i is filled with i."""

    def __init__(self, several: bool = False) -> None:
        self.several, self.targets = several, [index % 3 for index in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 4, 4), index, dtype=torch.uint8)
        return ({"image": image, "age": torch.tensor([1.0 * index])}, index % 3) if self.several else (image, index % 3)


def both(name: str, **given: Any) -> Transforms:
    """The same transform for training and evaluation."""
    return Transforms(*(transform_of(key, target(name, **given)) for key in ("data.transform", "data.test_transform")))


@pytest.fixture
def made(kept: Any) -> Any:
    return lambda data, workers=0, **settings: kept(make_feed(data, 4, SEED, num_workers=workers, **settings))


def drawn_for(epoch: int, sample: int) -> list[float]:
    """What the generators give, seeded for one sample."""
    seed_generators(SEED, Key(epoch, sample))
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_draws_follow_from_seed_epoch_and_sample_whatever_the_number_of_workers(made: Any, workers: int) -> None:
    feed = made(transformed(Items(), both("Drawn"), training=True), workers)
    for start in (0, 4, N, 2 * N + 8):
        feed.announce([start])
        feed.wait([start])
        found = feed.batch(start).inputs[:, :, 0, 0]
        ids = epoch_order(SEED, start // N, N)[start % N : start % N + 4].tolist()
        expected = torch.tensor([drawn_for(start // N, sample) for sample in ids])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_evaluation_takes_its_own_transform_also_of_training_data(made: Any) -> None:
    transforms = Transforms(transform_of("data.transform", target("dark")))
    feed = made(transformed(Items(), transforms, training=True))
    assert set((feed.batch(0).inputs * 255).round().unique().tolist()) == {9}
    (whole,) = list(feed.evaluation_batches(N))
    assert (whole.inputs[:, 0, 0, 0] * 255).round().tolist() == list(range(N))
    assert (feed.first_samples(2).inputs[:, 0, 0, 0] * 255).round().tolist() == [0, 1]


def test_data_keep_their_classes_labels_and_parts() -> None:
    data = transformed(Items(), both("dark"), training=True)
    assert isinstance(data, TransformedData)
    part = data.subset(np.array([1, 5, 6]))
    assert class_labels(part).tolist() == [1, 2, 0] and len(part) == 3
    assert [int(part[index][1]) for index in range(3)] == [1, 2, 0]
    assert part.form == data.form


def test_the_image_among_several_inputs_is_transformed(made: Any) -> None:
    feed = made(transformed(Items(several=True), both("dark"), training=True))
    batch = feed.batch(0)
    assert set((batch.inputs["image"] * 255).round().unique().tolist()) == {9}
    assert batch.inputs["age"].flatten().tolist() == epoch_order(SEED, 0, N)[:4].tolist()


def test_tensors_become_items_only_where_they_are_transformed() -> None:
    source = Digits(transform=target("values"), test_transform=target("values"), validation_fraction=0.1).load(False)
    assert all(isinstance(own, TransformedData) for own in (source.train, source.validation, source.test))
    assert (source.mean, source.std, source.num_classes, source.input_shape) == (None, None, 10, (1, 8, 8))
    assert "data.transform.target=users_transforms.values, and stay as they are" in source.notes[0]
    assert Digits().declared() is not None and Digits(transform=target("values")).declared() is None
    only = Digits(transform=target("inverted")).load(False)
    assert isinstance(only.train, TransformedData) and isinstance(only.test, tuple) and only.mean == Digits.MEAN


def test_pillow_images_become_tensors_where_no_transform_makes_them_such() -> None:
    source = Custom(target="users_transforms.pictures", transform=target("smaller", size=6)).load(False)
    assert (source.num_classes, source.input_shape) == (3, (3, 6, 6))
    image, label = source.test[2]
    assert (image.dtype, image[:, 0, 0].tolist(), int(label)) == (torch.uint8, [2, 0, 0], 2)


def test_an_item_by_its_index_repeats_and_leaves_the_generators_of_its_caller(tmp_path: Path) -> None:
    def states() -> Any:
        return random.getstate(), str(np.random.get_state()), torch.initial_seed(), torch.get_rng_state().tolist()

    for part in ("train", "val"):
        write_part(tmp_path / "photos" / part)
    drawn = target("Drawn", size=5)
    folder = ImageFolder(folder=str(tmp_path / "photos"), size=5, resize=8, transform=drawn, test_transform=drawn)
    for data in (transformed(Items(), both("Drawn"), training=True), folder.load(False).test):
        seed_generators(0, Key(0, 2))
        expected = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(1))])
        for seed in (7, 8):
            seed_generators(seed, Key(0, 0))
            before = states()
            torch.testing.assert_close(data[2][0][:, 0, 0], expected, rtol=0, atol=1e-6)
            assert states() == before


def test_images_of_a_folder_reach_the_transform_whole(tmp_path: Path, made: Any) -> None:
    for part in ("train", "val"):
        write_part(tmp_path / "photos" / part)
    settings = {"folder": str(tmp_path / "photos"), "size": 5, "resize": 8, "flip": False}
    source = ImageFolder(**settings, transform=target("of_image"), validation_fraction=0.3).load(False)
    assert source.input_shape == (3, 5, 5) and len(source.train) + len(source.validation) == 9
    with Image.open(tmp_path / "photos" / "train" / "ant" / "ant_0.png") as image:
        corner = torch.from_numpy(np.array(image)[:5, :5].copy()).permute(2, 0, 1)
    whole = ImageFolder(**settings, transform=target("of_image")).load(False)
    for workers in (0, 1):
        feed = made(whole.train, workers)
        taken = [feed.batch(start) for start in (0, 4)]
        pixels, labels = torch.cat([own.inputs for own in taken]), torch.cat([own.targets for own in taken])
        ids = epoch_order(SEED, 0, 9)[:8].tolist()
        assert labels.tolist() == [sample // 3 for sample in ids]
        if 0 in ids:
            torch.testing.assert_close(pixels[ids.index(0)] * 255, corner.float(), rtol=0, atol=1e-3)
    plain = ImageFolder(**settings).load(False)
    assert torch.equal(whole.test[1][0], plain.test[1][0])  # the centre, as without a transform
    floats = ImageFolder(**settings, transform=target("Drawn", size=5), test_transform=target("Drawn", size=5))
    source = floats.load(False)
    assert (source.mean, source.train.image_shape) == (None, None)
    assert made(source.train).batch(0).inputs.shape == (4, 3, 5, 5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transform": {"size": 3}}, r"data\.transform must have a target.*set data\.transform\.target=package"),
        ({"transform": target("nothing")}, r"data\.transform\.target=users_transforms\.nothing cannot be imported"),
        ({"transform": target("dark", colour=1)}, r"dark cannot be called with data\.transform\.colour \(TypeError"),
        ({"transform": target("number")}, "number must return a function of an image, got int"),
        ({"transform": target("failing")}, r"failing cannot take item 0 of the data set, a tensor \[1, 8, 8\] of"),
        ({"transform": target("flat")}, r"flat must give tensors \[C, H, W\] of bytes .* tensor \[4, 4\] of"),
        ({"transform": target("values")}, r"values: training images are \[1, 8, 8\] of float32, and .* of uint8; give"),
        ({"test_transform": target("dark")}, r"data\.test_transform\.target=users_transforms\.dark: training images"),
    ],
)
def test_transforms_that_do_not_fit_are_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        Digits(**settings).load(False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_whose_images_differ_is_named_with_the_sample(made: Any, workers: int) -> None:
    feed = made(transformed(Items(), both("uneven"), training=True), workers)
    said = r"data\.transform\.target=users_transforms\.uneven must give images of one shape .* \[3, 4, 5\] of uint8 "
    with pytest.raises(BadDataError, match=said + "for item 7 of the data set and"):
        for start in range(0, N, 4):
            feed.announce([start])
            feed.wait([start])


def test_images_of_several_sizes_without_a_transform_are_named(made: Any) -> None:
    with pytest.raises(UserError, match=r"training images are \[3, 6, 6\] of uint8, and those to evaluate \[3, 6, 9\]"):
        settings = {"args": {"sizes": (9, 6, 6, 6)}, "transform": target("smaller", size=6)}
        Custom(target="users_transforms.pictures", **settings).load(False)
    source = Custom(
        target="users_transforms.pictures", args={"sizes": (6, 6, 9, 6)}, transform=target("smaller", size=6)
    ).load(False)
    with pytest.raises(BadDataError, match=r"the data set must give images of one shape .* \[3, 6, 9\] .* item 2"):
        list(made(source.test).evaluation_batches(4))


def test_batches_of_a_collate_and_several_images_are_refused() -> None:
    with pytest.raises(UserError, match="has its own collate; transform them there"):
        transformed(Collated(Items(), list), both("dark"), training=True)

    class Two(Items):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, image, label

    with pytest.raises(UserError, match="item 0 of the data set has 2 among its inputs"):
        transformed(Two(), both("dark"), training=True)


def test_floating_images_are_not_flipped_by_keys(made: Any) -> None:
    with pytest.raises(UserError, match=r"data\.flip=true .* need uint8 image tensors"):
        made(transformed(Items(), both("values"), training=True), augmentation=Augmentation(flip=True))


def test_rand_augment_without_torchvision_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(UserError, match=r"data\.rand_augment=9 needs torchvision, .*; pip install torchvision, or set"):
        Digits(rand_augment=9).load(False)
    assert rand_augment_of(0) is None


class TestWithTorchvision:
    """What needs torchvision."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError) as error:  # the latter if it was built for another torch
            pytest.skip(f"no torchvision: {error}")

    def test_rand_augment_is_that_of_torchvision_seeded_by_sample(self, made: Any) -> None:
        v2 = importlib.import_module("torchvision.transforms.v2")
        source = Digits(rand_augment=20).load(False)
        expected, pixels = v2.RandAugment(magnitude=20), Digits().load(False).train[0]
        num = len(source.train)
        for workers in (0, 1):
            feed = made(source.train, workers)
            for start in (0, num):
                found = (feed.batch(start).inputs * 255).round()
                ids = epoch_order(SEED, start // num, num)[:4].tolist()
                for place, sample in enumerate(ids):
                    seed_generators(SEED, Key(start // num, sample))
                    assert torch.equal(found[place], expected(pixels[sample]).float())
        assert isinstance(source.test, tuple)  # as it was

    def test_rand_augment_follows_crops_of_a_folder_and_refuses_floats(self, tmp_path: Path, made: Any) -> None:
        for part in ("train", "val"):
            write_part(tmp_path / "photos" / part)
        settings = {"folder": str(tmp_path / "photos"), "size": 6, "resize": 8, "flip": False}
        plain, augmented = (ImageFolder(**settings, rand_augment=own).load(False).train for own in (0, 20))
        one, other = (made(own).batch(0).inputs for own in (plain, augmented))
        assert one.shape == other.shape and not torch.equal(one, other)
        assert torch.equal(plain[3][0], augmented[3][0])
        with pytest.raises(UserError, match=r"rand_augment=9 is for bytes, got a tensor \[3, 6, 6\] of float32; put"):
            floats = {key: target("Drawn", size=6) for key in ("transform", "test_transform")}
            ImageFolder(**settings, rand_augment=9, **floats).load(False)

    def test_transforms_of_torchvision_take_keys_beside_their_target(self, made: Any) -> None:
        crop = {"target": "torchvision.transforms.v2.RandomCrop", "size": 8, "padding": 2}
        source = Digits(transform=crop).load(False)
        batch, pixels = made(source.train).batch(0), Digits().load(False).train[0]
        (first, *_) = epoch_order(SEED, 0, len(source.train)).tolist()
        padded = torch.nn.functional.pad(pixels[first].float(), (2, 2, 2, 2))
        crops = [padded[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
        found: Tensor = (batch.inputs[0] * 255).round()
        assert any(torch.equal(found, own) for own in crops)
