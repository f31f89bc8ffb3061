"""The kernels of a few rounds, by time: what a round of each executor launches, and how long each takes.

    python experiments/gpu/profile_rounds.py FOLDER --cells NAME:K:B ...

Writes FOLDER/NAME_K_B.txt. Use the switches (CROSSBOW_KERNELS) of the runs that are to be explained.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from torch.profiler import ProfilerActivity, profile

from experiments.bench.results import count
from experiments.bench.rounds import Rounds, Setup

_CELLS = ("serial:1:16", "streams:8:16", "fused:1:16", "fused:8:16", "fused:64:16")
_WARM_ROUNDS, _MOST, _PRINTED = 8, 80, 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--cells", nargs="+", default=_CELLS)
    parser.add_argument("--rounds", type=count, default=10)
    given, failed = parser.parse_args(), 0
    given.folder.mkdir(parents=True, exist_ok=True)
    for cell in given.cells:
        try:
            lines = profiled(cell, given)
        except Exception:  # one cell that fails leaves the others
            failed = 1
            traceback.print_exc()
            continue
        (given.folder / f"{cell.replace(':', '_')}.txt").write_text("\n".join(lines) + "\n")
        print("\n".join(lines[: _PRINTED + 1]), flush=True)
    return failed


def profiled(cell: str, given: argparse.Namespace) -> list[str]:
    """Return a line of totals, and one for each kernel: microseconds a round, launches a round, name."""
    executor, k, b = cell.split(":")
    on_cuda, n = given.device == "cuda", given.rounds
    setup = Setup(given.model, int(b), int(k), executor, given.device, "bf16" if on_cuda else "fp32")  # type: ignore[arg-type]
    with Rounds(setup) as rounds:
        rounds.run(_WARM_ROUNDS)
        begun = time.perf_counter()
        rounds.run(n)
        ms = 1e3 * (time.perf_counter() - begun) / n
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as found:
            rounds.run(n)
    times, counts = Counter[str](), Counter[str]()
    for event in found.events() or ():
        if not on_cuda or event.device_type.name == "CUDA":
            times[event.name] += event.device_time if on_cuda else event.cpu_time
            counts[event.name] += 1
    total, launches = sum(times.values()) / n / 1e3, sum(counts.values()) / n
    head = f"{cell}: {ms:.3f} ms a round by the clock, {total:.3f} ms of kernels, {launches:.0f} launches"
    own = [f"{times[name] / n:10.1f} us {counts[name] / n:8.1f} x  {name}" for name, _ in times.most_common(_MOST)]
    return [head, *own]


if __name__ == "__main__":
    raise SystemExit(main())
