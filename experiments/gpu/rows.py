"""Images/s of executors, learners and batch sizes in one process, by turns: the rows of the throughput table.

    python experiments/gpu/rows.py --json PATH --cells NAME:K:B:RULE[:PRECISION] ... [--profile FOLDER]

NAME is serial, streams, fused, tuned (one model: bf16 weights, fused SGD, channels-last, a CUDA graph of a step) or
compiled (the same after torch.compile). RULE is sma, or none: learners that share the samples out and never meet.
Cells are built first, then windows of all are taken in turns, so that what disturbs them disturbs all alike. The file
is written after each cell and each turn. cuDNN searches its algorithms for all cells. No data set is needed. With
`--profile` there is at last a file for each cell: the kernels of a round, by time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch.profiler import ProfilerActivity, profile

from crossbow_py.averaging import SMA
from crossbow_py.core.errors import CrossbowError, one_line
from crossbow_py.engine.device.memory import is_device_lost
from crossbow_py.engine.executors.on_device import Program
from crossbow_py.engine.trust import facts, in_use
from experiments.bench.machine import machine
from experiments.bench.program import count, positive
from experiments.bench.results import write_result
from experiments.bench.rounds import Rounds, Setup
from experiments.bench.sides.captured import captured, model_step
from experiments.bench.workloads import Workload, prepare
from experiments.gpu.report import row_name, rows_text

_NEVER = 10**9
_IMAGES = 8192
_WARM_ROUNDS = 6  # eager ones, a capture, replays
_WARM_S = 0.05
_PROFILED, _MOST_KERNELS = 10, 80
_COMPILE = {"cuda": "max-autotune-no-cudagraphs", "cpu": "default"}


class Side:
    """A cell at work: `step` enqueues a round of some images, `settle` waits until all are over."""

    def __init__(self, step: Callable[[], object], settle: Callable[[], object], images: int) -> None:
        self.step, self.settle, self.images = step, settle, images

    def window(self, seconds: float) -> tuple[float, float]:
        """Return images/s and milliseconds a round, of whole rounds between two waits for the device."""
        for _ in range(2):
            self.step()
        self.settle()
        rounds, begun = 0, time.perf_counter()
        while rounds == 0 or time.perf_counter() - begun < seconds:
            self.step()
            rounds += 1
        self.settle()
        took = time.perf_counter() - begun
        return rounds * self.images / took, 1e3 * took / rounds


def build(cell: str, given: argparse.Namespace, workload: Workload) -> tuple[Side, Callable[[], dict[str, Any]]]:
    """Return a cell's side, and what says how its rounds run."""
    name, k, b, rule, *own = cell.split(":")
    precision = own[0] if own else given.precision
    if name in ("tuned", "compiled"):
        mode = _COMPILE[given.device] if name == "compiled" else None
        step = captured(model_step(precision, replace(workload, batch_size=int(b)), mode), given.device)
        rounds = "captured" if given.device == "cuda" else "eager"  # a capture that fails raises
        return Side(step, partial(synchronize, given.device), int(b)), lambda: {"rounds": rounds, "notes": []}
    setup = Setup(given.model, int(b), int(k), name, given.device, precision)  # type: ignore[arg-type]
    averaging = SMA() if rule == "sma" else SMA(averaging_period=_NEVER)
    ours = Rounds(setup, max(_IMAGES, 2 * int(k) * int(b)), averaging=averaging)
    return Side(ours.submit, ours.drain, int(k) * int(b)), lambda: how_it_runs(ours)


def how_it_runs(ours: Rounds) -> dict[str, Any]:
    """Return whether an executor replays graphs, the ways of its convolutions, and what it has to say."""
    programs, *convolutions = parts_of(ours.executor, (Program, *_convolutions()))
    programs = [program for program in programs if program.graphs or program.eager_rounds]  # that were launched
    graphs = {program.name: "captured" if program.graphs else "eager" for program in programs}
    kinds = set(graphs.values()) or {"eager"}
    ways = Counter(f"{to} {way}" for each in chain(*convolutions) for to, way in each._ways.items())
    return {
        "rounds": kinds.pop() if len(kinds) == 1 else "mixed",
        "programs": graphs,
        "eager_rounds": max((sum(program.eager_rounds.values()) for program in programs), default=None),
        "convolutions": dict(sorted(ways.items())),
        "notes": list(dict.fromkeys(ours.executor.notes)),
    }


def _convolutions() -> tuple[type, ...]:
    """Return the class of a layer's convolution of all learners; none without Triton."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from crossbow_py.engine.fusion.units.convolution import Convolution  # noqa: PLC0415  needs Triton

    return (Convolution,)


def parts_of(root: object, kinds: tuple[type, ...]) -> list[list[Any]]:
    """Return the objects of each kind that another one holds, however deep."""
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    seen, waiting = set[int](), [root]
    while waiting:
        own = waiting.pop()
        if id(own) in seen or isinstance(own, type | ModuleType | torch.Tensor | torch.nn.Module):
            continue
        seen.add(id(own))
        if type(own) in found:
            found[type(own)].append(own)
        # A function also refers to the globals of its module.
        waiting += list(own.__closure__ or ()) if isinstance(own, FunctionType) else gc.get_referents(own)
    return list(found.values())


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--json", type=Path, required=True, help="write the results there")
    add("--cells", nargs="+", required=True, help="the most wanted first")
    add("--profile", type=Path, metavar="FOLDER", help="write the kernels of a round of each cell there")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--model", default="resnet32")
    add("--precision", choices=("fp32", "bf16"))
    add("--seconds", type=positive, default=0.25, help="of a window")
    add("--turns", type=count, default=5)
    add("--build-s", type=positive, default=1e9, help="seconds after which no other cell is begun")
    given = parser.parse_args(argv)
    given.precision = given.precision or ("bf16" if given.device == "cuda" else "fp32")
    torch.backends.cudnn.benchmark = True
    device = torch.device(given.device)
    result: dict[str, Any] = {
        "kind": "rows", "machine": machine(), "trust": facts(device), "in_use": in_use(device), "model": given.model,
        "device": given.device, "seconds": given.seconds, "cudnn_benchmark": True, "rows": {},
    }  # fmt: skip
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare(given.model, 1, given.device, Path(folder))
        if not (build_all(given, workload, sides, result) and take_turns(sides, given, result)):
            return 1  # the device is lost to this process
    for cell, side in sides.items() if given.profile else ():
        given.profile.mkdir(parents=True, exist_ok=True)
        (given.profile / f"{cell.replace(':', '_')}.txt").write_text(kernels_of(side, given.device))
    try:
        print(f"\n{rows_text(result)}")
    except ValueError as error:
        print(f"error: {error}")
        return 1
    return 0 if sides else 1


def build_all(
    given: argparse.Namespace, workload: Workload, sides: dict[str, Side], result: dict[str, Any]
) -> bool:
    """Build cells and try each by itself, until the time is up; returns False if the device is lost."""
    begun = time.monotonic()
    for cell in given.cells:
        precision = (*cell.split(":")[4:], given.precision)[0]
        row = result["rows"][cell] = {"precision": precision, "images_per_s": [], "ms": []}
        started, free = time.monotonic(), torch.cuda.mem_get_info()[0] if given.device == "cuda" else 0
        try:
            if started - begun > given.build_s:
                raise TimeoutError("no time was left to build it")
            side, said = build(cell, given, workload)
            for _ in range(_WARM_ROUNDS):
                side.step()
            side.settle()
            row["first_images_per_s"] = round(side.window(_WARM_S)[0])
            row |= said()
            sides[cell] = side
        except (RuntimeError, ValueError, KeyError, TimeoutError, CrossbowError) as error:
            traceback.print_exc()
            row["error"] = one_line(error)[:300]
            if is_device_lost(error, torch.device(given.device)):
                write_result(given.json, result)
                return False
        row["build_s"] = round(time.monotonic() - started, 2)
        if given.device == "cuda":
            row["memory_mib"] = (free - torch.cuda.mem_get_info()[0]) >> 20
        print(f"{row_name(cell)}: {row.get('first_images_per_s', row.get('error'))}, {row['build_s']} s", flush=True)
        write_result(given.json, result)
    return True


def take_turns(sides: dict[str, Side], given: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Take a window of each side in each turn; returns False, and says so, if the device is lost."""
    for _ in range(given.turns):
        for cell, side in sides.items():
            try:
                rate, ms = side.window(given.seconds)
            except (RuntimeError, CrossbowError) as error:
                traceback.print_exc()
                result["rows"][cell]["error"] = one_line(error)[:300]
                write_result(given.json, result)
                return False
            result["rows"][cell]["images_per_s"].append(round(rate, 1))
            result["rows"][cell]["ms"].append(round(ms, 4))
        write_result(given.json, result)
    return True


def kernels_of(side: Side, device: str) -> str:
    """Return a line of totals, then one for each kernel: microseconds a round, launches a round, name."""
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        for _ in range(_PROFILED):
            side.step()
        side.settle()
    times, counts = Counter[str](), Counter[str]()
    for event in found.events() or ():
        if device == "cpu" or event.device_type.name == "CUDA":
            times[event.name] += event.cpu_time if device == "cpu" else event.device_time
            counts[event.name] += 1
    n = _PROFILED
    head = f"{sum(times.values()) / n / 1e3:.3f} ms of kernels a round, {sum(counts.values()) / n:.0f} launches"
    kernels = times.most_common(_MOST_KERNELS)
    return "\n".join([head, *(f"{us / n:10.1f} us {counts[name] / n:8.1f} x  {name}" for name, us in kernels), ""])


if __name__ == "__main__":
    raise SystemExit(main())
