"""`make gpu-packs`: one failure does not stop the rest, and is named at the end."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.pages.snippets import ROOT

PYTHON = """#!/bin/sh
case "$*" in *inference*|*test_packs*) exit 3;; esac
case "$*" in *experiments*|*pytest*) echo "ran $*";; esac
"""


def test_failure_is_named_at_the_end_and_stops_nothing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "--old-file", "setup", f"BIN={tmp_path}", "gpu-packs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran")]
    assert [words[-1] for words in ran[:1]] == ["tests/gpu/test_ensemble.py"]
    assert [words[0] for words in ran[1:]] == [
        "experiments/model_batch/run.py", "experiments/pack_step_time/run.py", "experiments/hyperband/run.py",
        "experiments/tables",
    ]  # fmt: skip
    last = next(line for line in done.stderr.splitlines() if line.startswith("error: these failed:"))
    assert "[-m pytest -m gpu tests/gpu/test_packs.py]" in last and "experiments/model_batch/run.py inference" in last
