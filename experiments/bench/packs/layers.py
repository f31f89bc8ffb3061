"""Forward and backward of many small models, without an update: one after another, and in one fused pass.

ModelBatch's figure 2 has 64 fully connected layers. A batch is made once for all of the models, on every side.
"""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Feed
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.train.loop.planning import plan_round
from experiments.bench.gate import Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.packs.side import DEFAULT, TUNED, PackSide, PackWorkload
from experiments.bench.packs.training import new_pack
from experiments.bench.sides.captured import Step, captured, train_for_ever
from experiments.bench.sides.tuned import Form, fastest, thread_counts
from experiments.bench.workloads import Effort

_SEED = 0


def run_layers(side: PackSide, workload: PackWorkload, gate: Gate, effort: Effort) -> None:
    """Run for ever; every tick is a batch through all of the models."""
    torch.set_num_threads(usable_cores())
    if side.side == DEFAULT:
        step, detail = one_by_one(side.num_learners, workload), ""
    elif side.side == TUNED:
        step, detail = tuned_step(resident_one_by_one(side.num_learners, workload), workload.device, effort, "")
    else:
        step, detail = fused(side, workload), ""
    gate.ready(Ready(torch.get_num_threads(), detail))
    train_for_ever(step, side.num_learners * workload.batch_size, gate)


def one_by_one(num_models: int, workload: PackWorkload) -> Step:
    """Make the step of PyTorch's tutorials, `backward()` into `.grad`."""
    device = torch.device(workload.device)
    models = [workload.make_model().to(device) for _ in range(num_models)]
    feed = _feed(workload)
    place = 0

    def step() -> None:
        nonlocal place
        inputs, targets = feed.batch(place)
        place += workload.batch_size
        for model in models:
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    return step


def tuned_step(step: Step, device: str, effort: Effort, of: str) -> tuple[Step, str]:
    """The step with as many threads as suit it best; on CUDA a graph. And what to say of that."""
    if device == "cuda":
        return captured(step, device), f"one CUDA graph{of}"
    _, threads = fastest({Form("fp32", "none"): step}, thread_counts(usable_cores()), effort)
    torch.set_num_threads(threads)
    return step, ""


def resident_one_by_one(num_models: int, workload: PackWorkload) -> Step:
    """Make a step on one resident batch, so that a graph can hold it; gradients are returned and not accumulated."""
    device = torch.device(workload.device)
    models = [workload.make_model().to(device) for _ in range(num_models)]
    parameters = [list(model.parameters()) for model in models]
    inputs, targets = _feed(workload).batch(0)

    def step() -> None:
        for model, own in zip(models, parameters, strict=True):
            torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), own)

    return step


def _feed(workload: PackWorkload) -> Feed:
    return make_feed(
        workload.tensors(), workload.batch_size, _SEED, torch.device(workload.device), workload.augmentation,
        workload.mean, workload.std,
    )  # fmt: skip


def fused(side: PackSide, workload: PackWorkload) -> Step:
    """One pass of all models over the fused graph; on CUDA one graph, on one resident batch as the side it is for."""
    parts = new_pack(side, workload).run
    tasks = RoundTasks(
        parts.bank, update=parts.update, feed=parts.train_feed, loss=parts.loss, seed=_SEED, collective=parts.collective
    )
    all_models, index = FusedPass(tasks, kernels=workload.device == "cuda"), 0
    if workload.device == "cuda":
        first = plan_round(parts, 0, 0, 1.0)
        batch, shared = all_models.batch(first), all_models.shares(first)

        def learn() -> None:
            all_models.learn(batch, shared)

        return captured(learn, workload.device)

    def step() -> None:
        nonlocal index
        plan = plan_round(parts, index, index * workload.batch_size, 1.0)
        index += 1
        all_models.learn(all_models.batch(plan), all_models.shares(plan))

    return step
