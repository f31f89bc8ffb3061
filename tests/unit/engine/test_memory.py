"""Memory: what learners need, which errors mean that there is none left, and what glibc is asked for."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine import memory
from crossbow_py.engine.precision import BF16, FP32
from crossbow_py.errors import DeviceLostError, LearnerError, SearchError, UserError

BLOCK = 2**30 - 2**21


class Function:
    """A function of C that notes what it is given."""

    def __init__(self, calls, name, results):
        self.calls, self.name, self.results = calls, name, results

    def __call__(self, *arguments):
        self.calls.append((self.name, *arguments))
        return self.results.pop(0) if self.results else 0


class Libc:
    """What `keep_freed_memory` needs of glibc."""

    def __init__(self, **results):
        self.calls = []
        for name in ("mallopt", "malloc", "madvise", "free"):
            setattr(self, name, Function(self.calls, name, list(results.get(name, []))))


def keep(monkeypatch, libc):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: libc)
    memory.keep_freed_memory.__wrapped__()
    return libc.calls


def test_learner_in_bf16_has_a_shadow_and_float32_rows():
    own = memory.learner_bytes(1000, 30, 2, BF16, activations=500)
    assert (own.weights, own.gradients, own.corrections, own.state) == (4000, 4000, 4000, 8000)
    assert (own.shadow, own.buffers, own.activations) == (2000, 120, 500)
    assert (own.row, own.whole) == (22_120, 22_620)
    assert memory.learner_bytes(1000, 30, 1, FP32, activations=0).shadow == 0


def test_prediction_counts_activations_of_learners_that_run_at_once():
    own = memory.learner_bytes(1000, 0, 1, FP32, activations=500)
    assert memory.predicted_bytes(own, 4, at_once=4, fixed=7) == 7 + 3 * 4000 + 4 * 16_000 + 4 * 500
    assert memory.predicted_bytes(own, 4, at_once=1) == 3 * 4000 + 4 * 16_000 + 500
    with pytest.raises(AssertionError, match="at once"):
        memory.predicted_bytes(own, 4, at_once=5)


def caused_by(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (caused_by(UserError("the model cannot take the data"), torch.OutOfMemoryError()), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("not enough memory"), False),
        (None, False),
    ],
)
def test_errors_that_mean_no_memory_is_left(error, expected):
    assert memory.is_out_of_memory(error) is expected


def with_code(error, code):
    """As torch makes its own."""
    error.error_code = code
    return error


CUDA = torch.device("cuda")
ASSERTED = torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ASSERTED, True),
        (with_code(torch.AcceleratorError("CUDA error: in words nobody knows"), 719), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (LearnerError("learning(1)", 3, "learner 1", ASSERTED), False),  # which was not raised from it
        (caused_by(LearnerError("learning(1)", 3, "learner 1", ASSERTED), ASSERTED), True),
        (caused_by(LearnerError("learning(1)", 3, "learner 1", ASSERTED), caused_by(UserError(""), ASSERTED)), True),
        (with_code(torch.AcceleratorError("CUDA error: out of memory"), 2), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (with_code(torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), 900), False),
        (with_code(torch.AcceleratorError("CUDA error: invalid configuration argument"), 9), False),
        (caused_by(LearnerError("learning(1)", 3, "learner 1", ValueError()), ValueError("size mismatch")), False),
        (ValueError("unspecified launch failure"), False),  # of somebody else
        (None, False),
    ],
    ids=repr,
)
def test_errors_that_mean_the_device_is_lost(error, expected):
    assert memory.is_device_lost(error, CUDA) is expected
    assert not (memory.is_device_lost(error, CUDA) and memory.is_out_of_memory(error))
    assert not memory.is_device_lost(error, torch.device("cpu"))


def test_loss_of_the_device_is_raised_from_the_error_with_what_the_device_said():
    error = caused_by(LearnerError("learning(1)", 3, "learner 1", ASSERTED), caused_by(UserError("no"), ASSERTED))
    with pytest.raises(DeviceLostError, match="device-side assert triggered") as caught:
        memory.raise_if_lost(error, CUDA)
    assert caught.value.__cause__ is error
    memory.raise_if_lost(ValueError(), CUDA)
    memory.raise_if_lost(RuntimeError("misaligned address"), torch.device("cpu"))  # of a model that runs there


def test_loss_of_the_device_is_said_in_one_line_with_the_remedy():
    error = DeviceLostError(ASSERTED)
    assert isinstance(error, SearchError) and error.exit_code == 1
    said = str(error)
    assert "\n" not in said and "(CUDA error: device-side assert triggered)" in said
    assert "with resume=auto" in said and "device=cpu" in said
    assert "(RuntimeError)" in str(DeviceLostError(RuntimeError()))


def test_torch_says_so_in_these_words_on_this_machine():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert memory.is_out_of_memory(caught.value)


def test_freed_memory_is_kept_and_the_heap_stretched_in_whole_huge_pages(monkeypatch):
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}.get)  # 8 GiB, so 2
    start = 2**21 * 5 + 16
    calls = keep(monkeypatch, Libc(mallopt=[1, 1], malloc=[start, None]))
    aligned = 2**21 * 6
    assert calls == [
        ("mallopt", -3, 2**30),
        ("mallopt", -1, -1),
        ("malloc", BLOCK),
        ("malloc", BLOCK),  # refused
        ("madvise", aligned, 2**21 * 5 + BLOCK - aligned, 14),
        ("free", start),
    ]


def test_older_glibc_keeps_smaller_blocks_and_one_that_refuses_is_left_alone(monkeypatch):
    assert keep(monkeypatch, Libc(mallopt=[0, 1, 1])) == [
        ("mallopt", -3, 2**30),
        ("mallopt", -3, 2**25),
        ("mallopt", -1, -1),
    ]
    assert keep(monkeypatch, Libc(mallopt=[0, 0])) == [("mallopt", -3, 2**30), ("mallopt", -3, 2**25)]


def test_elsewhere_than_with_glibc_nothing_is_done(monkeypatch):
    assert keep(monkeypatch, type("Libc", (), {"calls": []})) == []
