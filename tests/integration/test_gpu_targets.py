"""`make gpu-*` by a Python that is given: nothing is set up, and what is missing is said in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pages.snippets import ROOT

PYTHON = """#!/bin/sh
case "$1" in -c) exit 0;; esac
echo "ran with PYTHONPATH=$PYTHONPATH: $*"
"""
STAGES = "experiments/gpu/on_device.py --results experiments"


def make(python: Path | str, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    inherited = ("PYTHONPATH", "OUT", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    words = ["make", target, f"GPU_PYTHON={python}", *options]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(("target", "words"), [
    ("gpu-check", "-m crossbow_py.check device=cuda again=true"),
    ("gpu-engine", f"{STAGES} tests suite sides update memory tables"),
    ("gpu-packs", f"{STAGES} tests.packs packs ensembles families hyperband tables"),
])  # fmt: skip
def test_given_python_runs_it_without_an_environment(target: str, words: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = make(python, target, f"VENV={tmp_path}/none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"ran with PYTHONPATH=.: {words}"
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = make(sys.executable, "gpu-check")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == ["error: no CUDA device is visible here; run make gpu on a machine with a GPU."]
