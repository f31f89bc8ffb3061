"""Errors that mean that memory has run out, or that the process has lost its device; and freeing memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from crossbow_py.core.errors import DeviceLostError

# torch has an exception only for its own CUDA allocator; the CPU allocator, pinned memory, CUDA graphs and the
# libraries raise a plain RuntimeError, which can be told from others only by its text.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Failed to CUDA calloc",  # NCCL's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # Handles of libraries need memory of the device, and say no more of it than this.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
)
# CUDA errors after which "the process must be terminated and relaunched", or values on the device may be wrong, by
# their numbers in the runtime and the driver.
_LOST_CODES = frozenset((214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
# The same errors as text: only torch's own exception has the number, those of Triton and the libraries do not.
_LOST_WORDS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that a device or the host has no memory left."""
    return any(_says_no_memory(each) for each in _causes(error))


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def is_device_lost(error: BaseException | None, device: torch.device) -> bool:
    """Return whether an error, or one of its causes, leaves a CUDA `device` unusable for the rest of this process.

    Every later call then fails as well. Errors of a single call do not count: missing memory, a launch that is too
    large, a capture that is refused. False for other devices.
    """
    return device.type == "cuda" and any(_says_lost(each) for each in _causes(error))


def _says_lost(error: BaseException) -> bool:
    code = getattr(error, "error_code", None)
    if isinstance(error, torch.AcceleratorError) and code is not None:
        return code in _LOST_CODES
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_WORDS)


def raise_if_lost(error: BaseException, device: torch.device) -> None:
    """Raise DeviceLostError from an error that leaves `device` unusable; call it before a trial is blamed for it."""
    if is_device_lost(error, device):
        said = next((each for each in _causes(error) if _says_lost(each)), error)
        raise DeviceLostError(said) from error


@contextmanager
def raising_if_lost(device: torch.device) -> Iterator[None]:
    """Have the block raise DeviceLostError instead of an error that leaves `device` unusable."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise_if_lost(error, device)
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes, which keep local variables alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextmanager
def quick_collections() -> Iterator[None]:
    """Have `free_memory` look at what is made in this block alone: all of torch's modules take it 0.2 s each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_memory(device: torch.device) -> None:
    """Return the memory that torch caches; call it once nothing refers to what failed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
