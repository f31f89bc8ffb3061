"""Copies of a buffer that no cache holds: what memory allows, to compare other work with.

A copy of n bytes counts as 2n, read and written. Ordinary stores make the processor read a line of the target before it
writes it, which is not counted, for a copy no more than for an update; the streaming copy does without.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

_SMALLEST_BYTES = {"cpu": 2**28, "cuda": 2**30}
_CACHES = 4  # the buffer is as many times the last cache, on processors whose last cache is large
_STREAMING = Path(__file__).with_name("streaming_copy.c")
_PIECE = 4096  # parts begin at multiples of it
_COMPILE_S = 60.0

Copy = Callable[[], None]


def copy_bytes(device: torch.device) -> int:
    """Size of the buffer: more than all caches."""
    smallest = _SMALLEST_BYTES[device.type]
    if device.type == "cpu" and "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        smallest = max(smallest, _CACHES * os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    return smallest // _PIECE * _PIECE


@contextmanager
def copies(device: torch.device) -> Iterator[Mapping[str, Copy]]:
    """Ways to copy `copy_bytes(device)`, by name: torch's and, on a CPU, two others on as many threads as torch uses.

    On CUDA a copy is enqueued on the current stream.
    """
    size = copy_bytes(device)
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    found: dict[str, Copy] = {"torch": lambda: _copy(target, source)}
    if device.type != "cpu":
        yield found
        return
    with ThreadPoolExecutor(torch.get_num_threads(), "copy") as threads:
        for name, function in (("memcpy", _memcpy()), ("streaming", _streaming())):
            if function is not None:
                found[name] = _in_parts(function, target, source, threads)
        yield found


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _in_parts(
    function: Callable[[int, int, int], object], target: Tensor, source: Tensor, threads: ThreadPoolExecutor
) -> Copy:
    size, parts = target.nbytes, torch.get_num_threads()
    ends = [size * part // parts // _PIECE * _PIECE for part in range(parts)] + [size]
    first = [(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)
             for begin, end in pairwise(ends)]  # fmt: skip

    def run() -> None:
        for done in [threads.submit(function, *part) for part in first]:
            done.result()

    return run


def _memcpy() -> Callable[[int, int, int], object] | None:
    function = getattr(ctypes.CDLL(None), "memcpy", None)
    return None if function is None else _declared(function)


def _streaming() -> Callable[[int, int, int], object] | None:
    """Build the streaming copy; None without a C compiler, or on another processor than the source is for."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "streaming_copy.so"
        command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(made), str(_STREAMING)]
        try:
            subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return _declared(ctypes.CDLL(str(made)).streaming_copy)  # what is loaded outlives its file


def _declared(function: ctypes._NamedFuncPointer) -> Callable[[int, int, int], object]:
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return function
