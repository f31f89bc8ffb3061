"""What does a round of eight learners launch and move on CUDA by torch's operators: a row each, and in one row?

    python -m tests.simulated_cuda experiments.averaged_gradients.count [MODEL]

Needs no GPU. Kernels and graphs are left out, as nothing on a simulated device has been tried.
"""

from __future__ import annotations

import sys

import torch

from crossbow_py.averaging import SMA, SynchronousSGD
from experiments.bench.rounds import Rounds, Setup
from experiments.tables.markdown import markdown_table
from experiments.throughput.roofline import OperatorCounter, count_step

K, BATCH_SIZE = 8, 16
RULES = {"a row each (SMA)": SMA(), "one row (synchronous_sgd)": SynchronousSGD()}


def main(model: str = "resnet32") -> None:
    rows = []
    for name, rule in RULES.items():
        with Rounds(Setup(model, BATCH_SIZE, K, "fused", "cuda", "fp32"), averaging=rule) as rounds:
            rounds.run(1)
            with torch.autograd.set_multithreading_enabled(False), OperatorCounter() as counter:
                rounds.run(1)
        rows.append([name, f"{counter.num_kernels}", f"{counter.operator_bytes / 1e9:.2f}"])
    plain = count_step(model, K * BATCH_SIZE, "fp32")
    rows.append(["one model with all samples", f"{plain.num_kernels}", f"{plain.operator_bytes / 1e9:.2f}"])
    print(markdown_table(["a round", "launches", "GB"], rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
