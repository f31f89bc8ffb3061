"""The time to set up fused rounds, with the comparison that they are trusted for and without it."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # it is run in processes of its own

import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.data.build import make_feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.fused_agreement import trusted_pass
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.models import MODELS
from experiments.bench.machine import ROOT
from experiments.bench.windows import spread

SHAPES = {"lenet": (1, 28, 28), "resnet32": (3, 32, 32), "vgg16": (3, 32, 32)}
LEARNERS, BATCH = 4, 16


def seconds(model: str, precision: str, compares: bool) -> float:
    torch.set_num_threads(1)
    shape, format_ = SHAPES[model], {"fp32": FP32, "bf16": BF16}[precision]
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4 * BATCH, *shape, generator=generator), torch.randint(0, 10, (4 * BATCH,), generator=generator)
    optimizer, rule, cpu = SGD(), SMA(), torch.device("cpu")
    bank = ReplicaBank(
        MODELS[model]().build(shape, 10), LEARNERS, device=cpu, precision=format_, state_names=optimizer.state_names,
        order="blocks",
    )  # fmt: skip
    tasks = RoundTasks(
        bank, update=choose_update(optimizer, rule, cpu, torch.float32)[0],
        feed=make_feed(data, BATCH, channels_last=True, dtype=format_.compute), loss=nn.functional.cross_entropy,
        seed=0, collective=Collective(),
    )  # fmt: skip
    plan = Round(0, tuple(j * BATCH for j in range(LEARNERS)), (0.1,) * LEARNERS, None)
    begun = time.process_time()
    fused = trusted_pass(tasks) if compares else FusedPass(tasks)
    fused.learn(fused.batch(plan), fused.shares(plan))
    return time.process_time() - begun


def measure(model: str, precision: str, repetitions: int) -> dict[str, Any]:
    """Seconds with and without, by turns, each in a process of its own; and the ratios of the pairs."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(repetitions):
        for side, values in found.items():
            arguments = [str(Path(__file__)), model, precision, *(["--compare"] if side == "with" else [])]
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
            )  # fmt: skip
            values.append(float(done.stdout.split()[-1]))
    ratios = [ours / plain for ours, plain in zip(found["with"], found["without"], strict=True)]
    return {"n": repetitions, "ratio": spread(ratios), **{side: spread(values) for side, values in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("precision", choices=["fp32", "bf16"])
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    print(seconds(options.model, options.precision, options.compare))


if __name__ == "__main__":
    main()
