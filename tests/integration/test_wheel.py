"""The wheel in an empty environment, outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_wheel_in_an_empty_environment_trains_the_digits(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("crossbow_py-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "crossbow_py/conf/experiment/digits.yaml" in names
    assert not [name for name in names if name.startswith(("tests/", "experiments/", "conf/"))]
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    elsewhere.mkdir()
    command = [python, "-m", "crossbow_py.train", "+experiment=digits", "output_dir=run"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((elsewhere / "run" / "summary.json").read_text())["test_accuracy"] >= 0.97
    listed = subprocess.run([str(environment / "bin" / "crossbow-train"), "--list"], capture_output=True, check=False)
    assert (listed.returncode, b"resnet32" in listed.stdout) == (0, True)
