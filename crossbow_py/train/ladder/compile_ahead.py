"""Compiles kernels before children launch them: variants are shared out among as many processes as there are cores.

    python -m crossbow_py.train.ladder.compile_ahead SHARE      SHARE is a `Share` in JSON

They fill Triton's own cache. What they fail to compile, or have not come to, is compiled where it is launched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from crossbow_py.core.host import read_host
from crossbow_py.core.triton_launch import interprets, recorded
from crossbow_py.distributed.launch import end_with_parent
from crossbow_py.train.ladder.children import kill, start
from crossbow_py.train.ladder.variants import PRECISIONS, failure_of, variants

_MOST = 32  # processes; with more, each compiles for less time than it imports torch
_MEMORY = 2**30  # bytes of a process, with torch and a compiler
_NICE = 10  # the processes that try rungs come first


@dataclass(frozen=True)
class Share:
    """A process's share of the variants: every `count`-th, from `index` on.

    Attributes:
        kernels: those to compile, in the order in which they are tried.
        precisions: the names of those that they are tried in.
        capability: the device's compute capability, as 90 for 9.0.
        index, count: the process's own number, and the number of processes.
    """

    kernels: Sequence[str]
    precisions: Sequence[str]
    capability: int
    index: int = 0
    count: int = 1


@contextlib.contextmanager
def compiling(
    kernels: Sequence[str], precisions: Sequence[str], capability: str, environment: Mapping[str, str]
) -> Iterator[None]:
    """Have processes compile the variants of some kernels during the block, and kill them at its end.

    `capability` is the device's compute capability, as "9.0"; `environment` is laid over this process's. There are none
    without kernels, for the interpreter, and where Triton has no driver to launch with.
    """
    is_of_use = kernels and capability and not interprets() and _has_driver()
    host = read_host()
    count = min(host.cores, host.memory_bytes // _MEMORY, _MOST) if is_of_use else 0
    started: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.suppress(OSError):  # without memory for as many
            for index in range(count):
                share = Share(kernels, precisions, int(capability.replace(".", "")), index, count)
                command = [sys.executable, "-m", __name__, json.dumps(asdict(share))]
                started.append(start(command, environment, subprocess.DEVNULL, subprocess.DEVNULL))
        yield
    finally:
        for process in started:
            kill(process)  # with the assembler that it may have started


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def compile_share(share: Share) -> None:
    """Compile a share of the variants, on a CPU. A variant that fails is left to who launches it."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415  Triton may not be there
    from triton.runtime.driver import driver  # noqa: PLC0415  likewise

    # All that Triton asks for up to a launch.
    driver.set_active(SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", share.capability, 32),
    ))  # fmt: skip
    every = (
        variant for kernels, name in itertools.product(share.kernels, share.precisions)
        for variant in variants(kernels, torch.device("cpu"), PRECISIONS[name])
    )  # fmt: skip
    for variant in itertools.islice(every, share.index, None, share.count):
        with recorded(runs=False, compiles=True):
            print(variant.name, failure_of(variant), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile a share of the variants; returns the exit code."""
    end_with_parent(signal.SIGKILL)
    os.nice(_NICE)
    torch.set_num_threads(1)
    compile_share(Share(**json.loads((sys.argv[1:] if argv is None else argv)[0])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
