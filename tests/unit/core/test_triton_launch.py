from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from crossbow_py.core.triton_launch import KernelError, compiles, launch, recorded, unavailable


@triton.jit
def _double(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


def test_launch_is_recorded_inside_the_block_alone():
    x, y = torch.arange(10.0), torch.zeros(10)
    with recorded() as launches:
        launch(_double, (2,), x, y, 10, BLOCK=8)
    launch(_double, (2,), x, y, 10, BLOCK=8)
    assert torch.equal(y, 2 * x)
    assert [(made.kernel, made.grid) for made in launches] == [("_double", (2,))]


def test_recorded_launch_names_what_it_would_have_been_and_does_not_run():
    x, y = torch.arange(10.0), torch.zeros(10)
    with recorded() as outer, recorded(runs=False) as launches:
        launch(_double, (2,), x, y, 10, BLOCK=8, num_warps=4)
    assert not y.any()
    assert outer == launches
    (made,) = launches
    assert made.constants == {"enable_fp_fusion": True, "BLOCK": 8, "num_warps": 4}
    assert (made.module, made.names) == (__name__, ("x", "y", "count", "BLOCK"))
    launch(_double, (2,), x, y, 10, BLOCK=8)
    assert torch.equal(y, 2 * x)


def test_kernels_on_cpu_need_the_interpreter(monkeypatch):
    assert unavailable(torch.device("cpu")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert unavailable(torch.device("cpu")) == "Triton runs on GPUs"


def test_old_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert unavailable(torch.device("cuda")) == "Tesla T4 is older than compute capability 8.0"


def test_missing_triton_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unavailable(torch.device("cpu")) == "Triton is not installed"


def test_compiler_that_fails_becomes_one_line():
    def check():
        raise RuntimeError("\nPTXAS error: no such target\nat line 12")

    with pytest.raises(KernelError, match=r"^Triton failed \(PTXAS error: no such target\)$"):
        compiles(check)
