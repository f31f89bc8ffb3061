"""Which errors mean that there is no memory left, and which that the device is lost."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.core.errors import DeviceLostError, LearnerError, SearchError, UserError
from crossbow_py.engine.device import memory


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
