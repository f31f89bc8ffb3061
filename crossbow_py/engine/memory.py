"""Memory of the host and of devices: how much learners need, keeping it between rounds, and running out of it.

And what else errors of a device may mean: that it is lost to the process.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from crossbow_py.engine.precision import Precision
from crossbow_py.errors import DeviceLostError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_HUGEPAGE = 14
_BLOCK, _HUGE_PAGE = 2**30 - 2**21, 2**21  # the largest glibc takes from its heap; of x86 and most ARM kernels
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


@dataclass(frozen=True)
class LearnerBytes:
    """What one learner needs on its device, in bytes.

    Attributes:
        weights, gradients, corrections: P master values each.
        state: the optimizer's P master values, as often as it has state rows.
        shadow: P values in the compute format, where that is another.
        buffers: floating-point buffers.
        activations: the most that a forward and a backward pass over a batch hold beside all of this: the batch,
            activations, the gradients as autograd makes them, and workspaces inside operators. Probed, not computed.
    """

    weights: int
    gradients: int
    corrections: int
    state: int
    shadow: int
    buffers: int
    activations: int

    @property
    def row(self) -> int:
        """What stays from round to round."""
        return self.weights + self.gradients + self.corrections + self.state + self.shadow + self.buffers

    @property
    def whole(self) -> int:
        """All of it."""
        return self.row + self.activations


def learner_bytes(
    num_values: int, num_buffer_values: int, num_states: int, precision: Precision, activations: int
) -> LearnerBytes:
    """What a learner of a model with P = `num_values` needs; padding to 128 bytes a block is not counted."""
    values = num_values * precision.master.itemsize
    return LearnerBytes(
        weights=values,
        gradients=values,
        corrections=values,
        state=num_states * values,
        shadow=num_values * precision.compute.itemsize if precision.has_shadow else 0,
        buffers=num_buffer_values * precision.master.itemsize,
        activations=activations,
    )


def predicted_bytes(own: LearnerBytes, num_learners: int, *, at_once: int, fixed: int = 0) -> int:
    """Peak of K learners on a device, of which `at_once` run at the same moment::

        fixed + (z, z_prev and the sum of corrections: 3 P values) + K · row + at_once · activations

    `fused`, `threads` and `streams` have all K at once; `serial` has one, as learners in turn use the same memory.
    `fixed` is what else is there: the data set, the template, the context of the device.
    """
    assert 1 <= at_once <= num_learners, f"{at_once} of {num_learners} learners cannot run at once"
    return fixed + 3 * own.weights + num_learners * own.row + at_once * own.activations


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


@functools.cache
def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks instead of returning them to the kernel after every round, and in huge pages.

    Activations are freed and allocated again each round; by default each time costs page faults (measured on two
    cores, ResNet-32 b=16, 45 steps: over 10⁵ faults against 2 to 10 · 10³), and rounds of many learners walk through
    more small pages than a core remembers (MLP, K=8, fused: 7 to 14 % of a round). It holds for the whole process, for
    good. Call it before what is to lie there is allocated. Elsewhere than with glibc nothing is done.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    # Older glibc caps the mmap threshold at 32 MiB. Trimming is touched only when that worked: alone, it would turn
    # off glibc's own growing threshold and make things worse.
    whole = mallopt(_M_MMAP_THRESHOLD, 2**30)
    if not (whole or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    if whole and hasattr(libc, "madvise"):
        _reserve_huge_pages(libc, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def _reserve_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Stretch glibc's heap by `size` bytes, asked for in huge pages. It takes addresses alone, no memory until used."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [libc.malloc(_BLOCK) for _ in range(max(1, size // _BLOCK))]
    for block in blocks:
        if block is not None:  # the kernel may refuse to promise so much
            first, end = -(-block // _HUGE_PAGE) * _HUGE_PAGE, (block + _BLOCK) // _HUGE_PAGE * _HUGE_PAGE
            libc.madvise(first, end - first, _MADV_HUGEPAGE)  # an error means small pages, as before
            libc.free(block)
