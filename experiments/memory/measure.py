"""The peak memory of some rounds, and of one learner's step. A process of its own for each, as pools do not mix then.

    python experiments/memory/measure.py '{"model": "lenet", "batch_size": 16, "num_learners": 2, "executor": "fused",
                                          "device": "cpu", "precision": "fp32"}'

prints what it found as one line of JSON. With one learner under `serial` it is the probe as well.

What is counted. On CUDA it is what torch's caching allocator has reserved of the device: every tensor, workspaces of
libraries that ask torch for them, rounding and fragmentation, and the pools of graphs; not the CUDA context. On CPU it
is what the bank holds plus the most that was at any moment taken from torch's CPU allocator during the rounds, from the
profiler's record of every allocation: activations, gradients, batches, and workspaces inside operators; not the data
set, the template, compiled code, what oneDNN takes by itself, or freed memory that glibc keeps.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch.autograd.profiler import profile

from crossbow_py.engine.bank.layout import Rows
from crossbow_py.engine.bank.replicas import ReplicaBank
from experiments.bench.rounds import Rounds, Setup

ROUNDS_ON_HOST = 3
# Eager rounds and the captures come first; the rounds after them are replays alone.
ROUNDS_TO_CAPTURE, ROUNDS_REPLAYED = 4, 4
_MEMORY_EVENT = "[memory]"


def weigh(setup: Setup) -> dict[str, int]:
    """Peak bytes of rounds; `held_bytes` of them are the bank's."""
    with Rounds(setup) as rounds:
        held = held_bytes(rounds.bank)
        if setup.device == "cpu":
            return {"held_bytes": held, "fixed_bytes": 0,
                    "measured_bytes": held + peak_on_host(lambda: rounds.run(ROUNDS_ON_HOST))}  # fmt: skip
        fixed = torch.cuda.memory_allocated() - held
        rounds.run(ROUNDS_TO_CAPTURE)
        to_capture = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        rounds.run(ROUNDS_REPLAYED)
        return {
            "held_bytes": held,
            "fixed_bytes": fixed,
            "measured_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_until_captured_bytes": to_capture,
        }


def probe(setup: Setup) -> dict[str, int]:
    """P, values of buffers and state rows of a learner, and the peak bytes of its forward and backward pass."""
    with Rounds(replace(setup, num_learners=1, executor="serial")) as rounds:
        bank = rounds.bank
        rounds.learn()  # libraries allocate once what they keep
        activations = peak_on_host(rounds.learn) if setup.device == "cpu" else peak_on_cuda(rounds.learn)
        return {
            "num_values": bank.layout.num_values,
            "num_buffer_values": bank.buffer_layout.num_values,
            "num_states": len(bank.state_names),
            "activation_bytes": activations,
        }


def held_bytes(bank: ReplicaBank) -> int:
    """The bytes of a bank's buffers, padding and alignment included; each storage once."""
    storages = {}
    for value in vars(bank).values():
        for rows in value.values() if isinstance(value, dict) else [value]:
            if isinstance(rows, Rows | torch.Tensor):
                tensor = rows.storage if isinstance(rows, Rows) else rows
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def peak_on_host(function: Callable[[], None]) -> int:
    """The most bytes taken from torch's CPU allocator at any moment of a call, beyond those before it."""
    with profile(use_device=None, profile_memory=True) as profiler:
        function()
    assert profiler.kineto_results is not None, "the profiler has stopped"
    events = [event for event in profiler.kineto_results.events() if event.name() == _MEMORY_EVENT]
    return peak(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def peak_on_cuda(function: Callable[[], None]) -> int:
    """The most bytes allocated at any moment of a call, beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak(changes: Iterable[int]) -> int:
    """The highest running sum of bytes taken (positive) and given back (negative); at least 0."""
    return max(itertools.accumulate(changes, initial=0))


def main(argument: str) -> dict[str, Any]:
    asked = json.loads(argument)
    is_probe = asked.pop("probe", False)
    setup = Setup(**asked)
    return probe(setup) if is_probe else weigh(setup)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
