"""What is said of a target that cannot be imported."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.core.targets import import_target


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("faulty_of_the_test.make", ["ValueError: no", "correct faulty_of_the_test, and see that what it imports"]),
        ("faulty_of_the_test.make", [f"fits torch {version('torch')}."]),
        ("nowhere_of_the_test.make", ["check the spelling", "PYTHONPATH, and that nowhere_of_the_test is installed"]),
        ("os.path.nosuch", ["has no attribute 'nosuch'); check the spelling, and that its folder is on PYTHONPATH."]),
    ],
)
def test_target_that_cannot_be_imported_is_told_with_what_helps(
    target: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_of_the_test.py").write_text("raise ValueError('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as raised:
        import_target("model.target", target)
    assert all(each in str(raised.value) for each in words), raised.value
