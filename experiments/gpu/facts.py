"""What this machine has, and the ceilings of its GPU: a copy, products of matrices, and the cost of a launch."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

_TOOLS = ("nvidia-smi", "nvcc --version", "df -h /dev/shm /tmp", "nproc", "free -g")
_WANTED = ("gcc", "ncu", "compute-sanitizer")
_ARITHMETIC = (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32))
_SIDE, _OPERATORS = 8192, 100


def milliseconds(run: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()  # host–device synchronisation
    return float(begin.elapsed_time(end)) / times


def main() -> int:
    for tool in _TOOLS:
        words = tool.split()
        if shutil.which(words[0]):
            print(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    print(*(f"{tool}: {shutil.which(tool) or 'missing'}" for tool in _WANTED), sep="\n")
    print(sys.version, platform.platform())
    print(*sorted(f"{each.name}=={each.version}" for each in importlib.metadata.distributions()), sep="\n")
    if not torch.cuda.is_available():
        print("no CUDA device is visible")
        return int("--device=cuda" in sys.argv)
    ceilings()
    return 0


def ceilings() -> None:
    card = torch.cuda.get_device_properties(0)
    print(card, "cudnn", torch.backends.cudnn.version(), "nccl", torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    values, copies = (torch.zeros(2**29, device="cuda") for _ in range(2))
    print(f"copy {2 * values.nbytes / milliseconds(lambda: copies.copy_(values)) / 1e9:.2f} TB/s, read and written")
    for word, dtype in _ARITHMETIC:
        torch.backends.cuda.matmul.allow_tf32 = word == "tf32"
        x = torch.randn(_SIDE, _SIDE, device="cuda", dtype=dtype)
        ms = milliseconds(lambda x=x: x @ x)  # type: ignore[misc]
        print(f"{word} {_SIDE}: {2 * _SIDE**3 / ms / 1e9:.0f} TFLOP/s")
    small = torch.randn(16, device="cuda")
    print(f"a launch of an eager operator: {1e3 * milliseconds(lambda: small.add_(1), 2000):.2f} us")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_OPERATORS):
            small.add_(1)
    print(f"an operator in a graph: {1e3 * milliseconds(graph.replay, 50) / _OPERATORS:.2f} us")


if __name__ == "__main__":
    raise SystemExit(main())
