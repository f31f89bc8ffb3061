"""The checks at the start of a run: of several programs and tiles, repeated to the bit."""

from __future__ import annotations

import sys

import pytest
import torch

from crossbow_py import data
from crossbow_py.averaging import SMA
from crossbow_py.core.triton_launch import KernelError, compiles, recorded, repeated
from crossbow_py.data.resident import image_kernels
from crossbow_py.engine import kernels
from crossbow_py.engine.kernels import checks
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.update import kernel_update
from crossbow_py.engine.update.optimizers import SGD
from tests.unit.engine.kernels.test_sanitizer import copy_of

CPU = torch.device("cpu")


def check(family):
    if family == "updates":
        kernel_update.check(SGD(), SMA(), CPU, FP32, True)
    else:
        checks._check(family, CPU, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["layers", "loss", "batches", "updates"])
def test_every_launch_of_a_check_has_several_programs_and_is_made_again(family):
    with recorded() as launches:
        check(family)
    assert all(torch.tensor(made.grid).prod() > 1 for made in launches)
    names = [made.kernel for made in launches]
    assert all(names.count(name) >= 2 for name in names)


# (family, module of the kernels, the one harmed, text, replacement): right for one tile, and wrong for several.
HARMED = [
    ("layers", "batch_norm", "statistics", "(tiles < num_tiles)[:, None]", "(tiles < 1)[:, None]"),
    ("layers", "batch_norm", "statistics", "first + lanes", "first + 0 * lanes"),
    ("layers", "batch_norm", "batch_norm", "tl.program_id(0) // column_blocks, columns", "0 * column_blocks, columns"),
    ("layers", "convolution", "convolution", "for other in range(splits)", "for other in range(1)"),
    ("loss", "cross_entropy", "cross_entropy", "range(0, batch, TARGETS)", "range(0, 1, TARGETS)"),
    ("loss", "cross_entropy", "cross_entropy", "total += tl", "total = tl"),
    ("batches", "image_kernels", "image_kernels", "at = block * BLOCK + tl.arange", "at = tl.arange"),
    ("updates", "update", "update", "at = (place // 4) * TILE + tl.arange", "at = tl.arange"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "harmed", "old", "new"), HARMED)
def test_check_finds_a_kernel_that_is_right_for_one_tile_alone(family, name, harmed, old, new, tmp_path, monkeypatch):
    module = copy_of(harmed, tmp_path, old, new)
    if harmed != name:
        monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{harmed}", module)
        module = copy_of(name, tmp_path)
    room = data.resident if module.__name__.endswith("image_kernels") else kernels
    monkeypatch.setattr(room, name, module)
    if name in ("cross_entropy", "image_kernels"):
        with pytest.raises(KernelError, match="differ from|give other"):
            module.check(CPU, torch.float32)
    # The interpreter may stumble over memory that nobody wrote.
    with pytest.raises(KernelError, match="differ from|give other|Triton failed"):
        compiles(lambda: check(family))


def test_results_that_differ_by_a_bit_when_repeated_are_refused():
    results = iter([torch.ones(3), torch.ones(3).nextafter(torch.tensor(2.0))])
    with pytest.raises(KernelError, match="the kernels of sums give other bits each time they run"):
        repeated("sums", lambda: [next(results)])


def test_values_that_are_not_numbers_repeat():
    assert repeated("sums", lambda: [torch.tensor([torch.nan])])[0].isnan()


@pytest.mark.slow
def test_a_check_of_images_is_of_several_blocks():
    with recorded() as launches:
        image_kernels.check(CPU, torch.float32)
    assert {made.grid[1] for made in launches} == {2, 3}
