"""Kernels compile for the GPUs they are meant for, within their budgets, on machines without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ROOT = Path(__file__).parents[2]
# Those of the CUDA builds of torch 2.11, of 2.12 and 2.13, and of 2.14; the one of 2.15 is what tests run with.
OLDER_TRITONS = ["3.6.0", "3.7.1", "3.8.0"]
CAPABILITIES = [80, 86, 89, 90, 100]
# Registers of a thread that a kernel may take. A processor has 65,536: 128 in 4 warps make 4 programs, in 8 warps 2.
REGISTERS = {
    "_forward": 168, "_backward": 224, "_statistics_kernel": 104, "_normalise_kernel": 64, "_backward_sums_kernel": 120,
    "_backward_inputs_kernel": 88, "_cross_entropy": 64, "_gather": 80, "_squares": 48, "_prepare": 64, "_update": 128,
    "_move": 48,
}  # fmt: skip
# Of bfloat16, whose factors of a product take half as many.
FEWER = {"_forward": 136, "_backward": 144}
SHARED_MEMORY = 99 * 1024  # bytes a program may have on compute capability 8.6 and 8.9; others have more
ON_THE_STACK = 16  # bytes: a few values that are not in registers, outside of loops
FEW_LEARNERS = range(2, 6)
# NVIDIA's ptxas of CUDA 12.8 to 13.0, which Triton 3.6 brings, drops the constant of a packed sum of 16-bit integers
# of which only one half is used: such a kernel reads the wrong pixels, and gives wrong gradients without an error.
MAY_MISCOMPILE = (90, 100)


def compiled(folder, *options, triton=None):
    """What the script prints, line by line; with a folder of another Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([*([str(triton)] if triton else []), str(ROOT)])
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def seen_with(variants, kernels):
    """The numbers of learners that each variant was seen with."""
    return {(each["precision"], each["key"]): each["learners"] for each in variants if each["kernel"] in kernels}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_is_within_its_budget(capability, tmp_path):
    made = compiled(tmp_path, "--capabilities", str(capability), "--learners", "8", "--each", "3")
    assert {each["kernel"] for each in made} == set(REGISTERS)
    for each in made:
        most = REGISTERS | (FEWER if each["precision"] == "bf16" else {})
        assert each["registers"] <= most[each["kernel"]], each
        assert each["spilled"] <= ON_THE_STACK, each
        assert each["shared"] <= SHARED_MEMORY, each
        assert capability not in MAY_MISCOMPILE or each["packed"] == 0, each
    # A product and a sum in one operation round once; `_move` rounds as torch's operators do.
    fuse = {each["kernel"] for each in made if each["fuses"]}
    assert "_update" in fuse
    assert "_move" not in fuse


@pytest.mark.timeout(120)
def test_gradients_of_resnet32s_first_stage_compute_with_no_packed_integers(tmp_path):
    """This kernel, of eight learners in bfloat16, had such sums, and gave wrong gradients of filters on an H100."""
    own = compiled(tmp_path, "--capabilities", *map(str, MAY_MISCOMPILE), "--precisions", "bf16", "--backward",
                   "16", "8", "16", "16", "32", "32")  # fmt: skip
    found = [(each["kernel"], each["capability"], each["packed"]) for each in own]
    assert found == [("_backward", capability, 0) for capability in MAY_MISCOMPILE]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_more_learner_compiles_nothing_but_convolutions_whose_tiles_change(tmp_path):
    variants = compiled(tmp_path, "--precisions", "bf16", "--models", "resnet32", "lenet", "--learners",
                        *map(str, FEW_LEARNERS))  # fmt: skip
    convolutions = {"_forward", "_backward"}
    others = seen_with(variants, set(REGISTERS) - convolutions)
    assert {tuple(learners) for learners in others.values()} == {tuple(FEW_LEARNERS)}
    # Tiles grow when learners double; then a third of the variants is new.
    new = {k: sum(min(each) == k for each in seen_with(variants, convolutions).values()) for k in FEW_LEARNERS}
    assert [k for k in FEW_LEARNERS if new[k]] == [2, 4]
    assert new[4] <= new[2] / 2


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OLDER_TRITONS)
def test_every_variant_compiles_with_the_triton_of_each_torch(version, tmp_path):
    """For every compute capability, with few learners and many. It takes a quarter of an hour and 1 GB on the disk."""
    triton = tmp_path / "triton"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", triton]
    if subprocess.run([*pip, f"triton=={version}"], capture_output=True, check=False, timeout=600).returncode != 0:
        pytest.skip(f"pip cannot install Triton {version} here")
    try:
        made = compiled(tmp_path, "--learners", "2", "16", "--capabilities", *map(str, CAPABILITIES), triton=triton)
    finally:
        shutil.rmtree(triton)
    assert {each["kernel"] for each in made} == set(REGISTERS)
    assert all(each["shared"] <= SHARED_MEMORY and each["spilled"] <= ON_THE_STACK for each in made)
    assert not [each for each in made if each["capability"] in MAY_MISCOMPILE and each["packed"]]
