"""What is said of a target that cannot be imported."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from crossbow_py.core import errors
from crossbow_py.core.errors import UserError
from crossbow_py.core.targets import import_target


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, that of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(errors, "_INSTALLED", (str(tmp_path),))
    importlib.invalidate_caches()
    return tmp_path


def test_package_that_fails_when_it_is_imported_is_no_matter_of_spelling(packages: Path) -> None:
    (packages / "vision_of_the_test.py").write_text("raise RuntimeError('operator vision::nms does not exist')")
    with pytest.raises(UserError) as raised:
        import_target("data.transform.target", "vision_of_the_test.RandomCrop")
    assert str(raised.value) == (
        "data.transform.target=vision_of_the_test.RandomCrop cannot be imported (RuntimeError: operator vision::nms "
        "does not exist); install a release of vision_of_the_test that fits torch "
        f"{version('torch')} and the other packages."
    )


def test_package_that_is_not_there_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = f"install the package that has cv2, in a release that fits torch {re.escape(version('torch'))}"
    monkeypatch.setitem(sys.modules, "cv2", None)  # which may be there
    with pytest.raises(UserError, match=rf"PYTHONPATH; if it is a package, {remedy}\.$"):
        import_target("data.transform.target", "cv2.RandomCrop")
