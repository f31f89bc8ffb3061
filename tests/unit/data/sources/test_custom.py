"""The user's own data: what may come back, and what is said when it does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.custom import Custom

MODULE = """
import numpy, torch
from torch.utils.data import Dataset, Subset

class Named(Dataset):
    classes = ("cat", "dog", "owl")
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(3, 2, 2), index % 2

class Listed(Dataset):
    targets = [0, 4, 1, 2]
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(7), self.targets[index]

def pair(size=6, classes=3): return torch.zeros(size, 5), torch.arange(size) % classes
def tensors(size=6): return pair(size), pair(3, 2)
def regression(): return (torch.zeros(6, 5), torch.zeros(6)), (torch.zeros(3, 5), torch.zeros(3))
def named(): return Named(), Named()
def subsets(): return Subset(Subset(Named(), [0, 1, 2]), [0, 1]), Subset(Named(), [3])
def listed(): return Listed(), Listed()
def bare(): return [(torch.zeros(2), 1)], [(torch.zeros(2), 0)]
def raises(): raise ValueError("no such file")
def one(): return pair()[0]
def unequal(): return pair(), (torch.zeros(3, 5), torch.zeros(2))
def arrays(): return (numpy.zeros((3, 5)), numpy.arange(3)), pair()
def three(): return pair(), pair(), (torch.zeros(4, 5), torch.zeros(4))
def missing(): return pair(), None
def streams(): import streaming
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `users_data` to import, and one that fails."""
    (tmp_path / "users_data.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("users_data", None)


@pytest.mark.parametrize(
    ("name", "num_classes", "input_shape"),
    [
        ("tensors", 3, (5,)),
        ("regression", None, (5,)),
        ("named", 3, (3, 2, 2)),
        ("subsets", 3, (3, 2, 2)),
        ("listed", 5, (7,)),
        ("bare", None, (2,)),
        ("arrays", 3, (5,)),
    ],
)
def test_load_of_a_users_function_finds_shape_and_classes(
    name: str, num_classes: int | None, input_shape: tuple[int, ...]
) -> None:
    source = Custom(target=f"users_data.{name}").load(progress=False)
    assert (source.num_classes, source.input_shape) == (num_classes, input_shape)
    assert (source.mean, source.std, source.augmentation.active) == (None, None, False)


def test_validation_data_of_a_function_is_taken() -> None:
    source = Custom(target="users_data.three").load(progress=False)
    assert [len(data[1]) for data in (source.train, source.test, source.validation)] == [6, 6, 4]
    with pytest.raises(UserError, match="returns validation data, and data.validation_fraction=0.5"):
        Custom(target="users_data.three", validation_fraction=0.5).load(progress=False)


def test_load_with_arguments_and_classes_given_uses_them() -> None:
    source = Custom(target="users_data.tensors", args={"size": 20}, num_classes=9, validation_fraction=0.25).load(False)
    assert (len(source.train[0]), len(source.validation[0]), source.num_classes) == (15, 5, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"data\.target must be a dotted path such as package\.module\.function, got ''"),
        ({"target": "users_broken.f"}, r"cannot be imported \(ZeroDivisionError.*; correct users_broken, and see that"),
        ({"target": "users_data.streams"}, r"failed with .* 'streaming'; .* see that streaming is installed in a"),
        ({"target": "users_data.raises"}, r"failed with ValueError: no such file; correct data\.args or the target"),
        ({"target": "users_data.tensors", "args": {"length": 3}}, "failed with TypeError: .*unexpected keyword"),
        ({"target": "users_data.one"}, r"must return \(train, test\), got Tensor; end it with"),
        ({"target": "users_data.unequal"}, r"the test data of .* as many inputs as targets .* got 3 and 2"),
        ({"target": "users_data.missing"}, "the test data of .* got NoneType"),
    ],
)
def test_load_of_an_unfit_target_is_a_user_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Custom(**settings).load(progress=False)
