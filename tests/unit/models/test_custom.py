"""Models of the user's own: targets that work and every way in which one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import CustomModel

MODULE = """
from torch import nn
CONSTANT = 3
def make(width=2):
    return nn.Linear(4, width)
def fails():
    raise ValueError("no such\\n  size")
def returns_text():
    return "model"
"""


@pytest.fixture
def my_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_of_the_test.py").write_text(MODULE)
    (tmp_path / "broken_of_the_test.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_models")
def test_build_of_a_function_passes_the_arguments() -> None:
    model = CustomModel(target="my_models_of_the_test.make", args={"width": 5}).build((4,), 5)
    assert isinstance(model, nn.Linear)
    assert model.out_features == 5


def test_build_of_a_module_class_makes_an_instance() -> None:
    model = CustomModel(target="torch.nn.Linear", args={"in_features": 3, "out_features": 2}).build((3,), 2)
    assert isinstance(model, nn.Linear)


@pytest.mark.usefixtures("my_models")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", r"must be a dotted path such as package\.module\.function, got ''"),
        ("make", r"must be a dotted path such as package\.module\.function, got 'make'"),
        ("a_module_that_is_not_there.make", r"cannot be imported \(ModuleNotF.*check the spell.* install the package"),
        ("my_models_of_the_test.mkae", r"cannot be imported \(AttributeError: "),
        (
            "broken_of_the_test.make",
            r"cannot be imported \(ModuleNotFoundError: .*\); install the package that has a_module_that_is_not",
        ),
        ("my_models_of_the_test.sub.make", r"not a package\); check the spelling, and that its folder is on PYTH.*\.$"),
        ("my_models_of_the_test.CONSTANT", r"must be callable, got int"),
        ("my_models_of_the_test.fails", r"called with model\.args=\{\} failed with ValueError: no such size"),
        ("my_models_of_the_test.returns_text", r"must return a torch\.nn\.Module, got str"),
    ],
)
def test_build_of_an_unusable_target_is_one_sentence_with_the_remedy(target: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.target.*{message}") as raised:
        CustomModel(target=target).build((4,), 2)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("my_models")
def test_build_with_an_unknown_argument_names_the_arguments() -> None:
    with pytest.raises(UserError, match=r"called with model\.args=\{'depth': 3\} failed with TypeError"):
        CustomModel(target="my_models_of_the_test.make", args={"depth": 3}).build((4,), 2)
