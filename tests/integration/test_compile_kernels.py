"""Kernels compile for the GPUs they are meant for, on machines without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "_forward", "_backward", "_statistics_kernel", "_normalise_kernel", "_backward_sums_kernel",
    "_backward_inputs_kernel", "_cross_entropy", "_gather", "_squares", "_prepare", "_update", "_move",
}  # fmt: skip
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have


@pytest.mark.parametrize("capability", [90, 80])
def test_every_kernel_compiles_and_fits_a_processor(capability, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _, _ in made} == KERNELS
    assert all(whole == "True" and int(shared) <= SHARED_MEMORY[capability] for _, whole, shared, _ in made)
    # A product and a sum in one operation round once; `_move` rounds as torch's operators do.
    fuse = {name for name, _, _, fuses in made if fuses == "True"}
    assert "_update" in fuse
    assert "_move" not in fuse
