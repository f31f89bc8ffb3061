"""Launching and counting Triton kernels, and the check that they can run on a device.

In Triton's interpreter (`TRITON_INTERPRET=1`, set before Triton is imported) kernels run on CPU tensors, program by
program. That is slow, but tests what they compute on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_REPETITIONS = 8  # by a check

# Ampere: bfloat16, asynchronous copies and the reductions that kernels use. Older GPUs are never tried.
_OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Launch:
    """A kernel launch: the kernel's name, its grid of programs, its arguments, and its constants and options by name.

    `module` is where the kernel is defined, and `names` are those of all its arguments, constants included.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    names: tuple[str, ...] = ()


@dataclass(eq=False)
class _Record:
    """A list of launches, whether the kernels run, and whether those that do not are compiled."""

    launches: list[Launch]
    runs: bool
    compiles: bool = False


_RECORDS: list[_Record] = []


def unavailable(device: torch.device) -> str | None:
    """Return why no kernel runs on a device, as half a sentence; None where kernels run."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None if interprets() else "Triton runs on GPUs"
    if device.type != "cuda":
        return f"Triton kernels are not made for {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return None


def interprets() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Enqueue a kernel on the current stream. The host blocks only at the first call, for compilation.

    A product and a sum may be fused into one operation that rounds once, unless `constants` have
    `enable_fp_fusion=False`; torch's operators round twice.
    """
    # Explicit, as Triton's own default is about to change.
    options = {"enable_fp_fusion": True, **constants}
    for record in _RECORDS:
        names = tuple(kernel.arg_names)
        record.launches.append(Launch(kernel.__name__, grid, arguments, options, kernel.fn.__module__, names))
    if launches_run():
        kernel[grid](*arguments, **options)
    elif any(record.compiles for record in _RECORDS):
        kernel.warmup(*arguments, grid=grid, **options)


def launches_run() -> bool:
    """Return whether kernels that are launched run. If not, there are no results to compare."""
    return all(record.runs for record in _RECORDS)


@contextlib.contextmanager
def recorded(runs: bool = True, compiles: bool = False) -> Iterator[list[Launch]]:
    """Yield a list that receives every launch of the block, in order. For counting and tests; not thread-safe.

    Without `runs`, kernels are recorded instead of run, and what they would write stays as it was: for counting at
    sizes that are too large for the interpreter. With `compiles` these are compiled, into Triton's own cache.
    """
    record = _Record([], runs, compiles)
    _RECORDS.append(record)
    try:
        yield record.launches
    finally:
        _RECORDS.remove(record)


class KernelError(Exception):
    """Kernels cannot be used here. The message says why, as half a sentence."""


def require(agrees: bool, message: str) -> None:
    """Raise KernelError if results do not agree with their reference; kernels that do not run have none."""
    if not agrees and launches_run():
        raise KernelError(message)


def check_size(on_gpu: int, interpreted: int) -> int:
    """Return how much a check of kernels tries: many programs on a GPU, few in the interpreter."""
    return interpreted if interprets() else on_gpu


def repeated(name: str, run: Callable[[], list[Tensor]], interpreted: int = 2) -> list[Tensor]:
    """Return the results of launches that are made several times, one after the other.

    In the interpreter, which runs program after program and cannot race, they are made `interpreted` times.
    Raises KernelError if they differ by a bit: programs that race, or that leave something behind, show that way.
    The host blocks at the end. Launches that do not run are made once.
    """
    found, *others = [run() for _ in range(check_size(_REPETITIONS, interpreted) if launches_run() else 1)]
    for results in others:
        for first, other in zip(found, results, strict=True):
            # Bits, as NaN differs from itself. A host–device synchronisation.
            if not torch.equal(*(each.contiguous().view(torch.uint8) for each in (first, other))):
                raise KernelError(f"the kernels of {name} give other bits each time they run")
    return found


def compiles(check: Callable[[], None]) -> None:
    """Run the check of a kernel family against its reference. Raises KernelError if Triton fails in whatever way."""
    try:
        check()
    except KernelError:
        raise
    except Exception as error:  # compilers raise what they like
        if "out of memory" in str(error) or isinstance(error, MemoryError):
            raise  # not the kernels' fault
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KernelError(f"Triton failed ({reason[:160]})") from error
