"""What errors of a device mean: that memory has run out, or that the device is lost to the process; and freeing it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from crossbow_py.core.errors import DeviceLostError

# torch has an exception for its own CUDA allocator alone; the CPU allocator, pinned memory, CUDA graphs and the
# libraries raise a plain RuntimeError, which differs from others in its words.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# CUDA's errors after which "the process must be terminated and relaunched" or what lies on the device is not to be
# relied on, by their numbers in the runtime and the driver.
_LOST_CODES = frozenset((214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
# And as CUDA says them: torch gives the number with its own exception alone, Triton and the libraries do not.
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
    """Whether an error, or what it was raised from, says that a device or the host has no memory left."""
    return any(_says_no_memory(each) for each in _causes(error))


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def is_device_lost(error: BaseException | None, device: torch.device) -> bool:
    """Whether an error, or what it was raised from, leaves a CUDA device unusable for the rest of this process.

    Every later call fails as well, whatever it is. Errors of a single call do not count: memory that is not there, a
    launch that is too large, a capture that is refused. Of what runs on another `device` none does.
    """
    return device.type == "cuda" and any(_says_lost(each) for each in _causes(error))


def _says_lost(error: BaseException) -> bool:
    code = getattr(error, "error_code", None)
    if isinstance(error, torch.AcceleratorError) and code is not None:
        return code in _LOST_CODES
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_WORDS)


def raise_if_lost(error: BaseException, device: torch.device) -> None:
    """Raise DeviceLostError from an error that leaves `device` unusable; ask before an error is made a trial's."""
    if is_device_lost(error, device):
        said = next((each for each in _causes(error) if _says_lost(each)), error)
        raise DeviceLostError(said) from error


@contextmanager
def raising_if_lost(device: torch.device) -> Iterator[None]:
    """Have the block raise DeviceLostError in place of an error that leaves `device` unusable."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise_if_lost(error, device)
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def forget_frames(error: BaseException | None) -> None:
    """Have an error, and what it came from, hold nothing any more of what was there when it was raised."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_memory(device: torch.device) -> None:
    """Give back what torch keeps for later; call it when what failed is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
