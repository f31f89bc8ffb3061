"""`vmap`: K independent models in one step of torch.func, each with a batch of its own; nothing is averaged.

The models are stacked by `stack_module_state`, gradients are `vmap(grad(...))` of one functional call, and torch's SGD,
being element-wise, steps the stacked parameters as it would each model's. BatchNorm's running statistics are stacked
buffers that vmap writes into. On CUDA the whole step goes into a graph where that works.

Of bfloat16 the first form that runs is taken: all of a model in bfloat16 over float32 masters, BatchNorm and its
statistics included, because vmap gives BatchNorm's result the wider of both types, which the next layer then refuses;
or else float32 weights under autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from experiments.bench.gate import Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.sides.captured import DeviceFeed, Step, captured, few_ahead, train_for_ever
from experiments.bench.sides.updates import master_update, plain_update
from experiments.bench.workloads import Workload

_SGD = "fused"

Batches = Callable[[], tuple[Tensor, Tensor]]


def vmapped(precision: str, num_learners: int, workload: Workload, gate: Gate) -> None:
    """Train `num_learners` models for ever. Raises RuntimeError when no form of a step runs."""
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(usable_cores())
    arithmetics = ("fp32",) if precision == "fp32" else ("bf16 weights", "autocast")
    arithmetic, step = first_that_runs(arithmetics, lambda name: _step_on(name, num_learners, workload))
    step, how = _in_a_graph(step, workload.device)
    gate.ready(Ready(torch.get_num_threads(), f"{arithmetic}, {how}"))
    train_for_ever(step, num_learners * workload.batch_size, gate)


def first_that_runs(arithmetics: Sequence[str], make: Callable[[str], Step]) -> tuple[str, Step]:
    """The first form of a step that can be made and run once. Raises the last one's RuntimeError when none can."""
    for place, arithmetic in enumerate(arithmetics):
        try:
            step = make(arithmetic)
            step()
        except RuntimeError:
            if place == len(arithmetics) - 1:
                raise
        else:
            return arithmetic, step
    raise AssertionError("there is at least one form")


def _in_a_graph(step: Step, device: str) -> tuple[Step, str]:
    if device != "cuda":
        return step, "eager"
    try:
        return captured(step, device), "one CUDA graph a step"
    except RuntimeError as error:
        return few_ahead(step), f"eager, as its capture failed ({str(error).splitlines()[0]})"


def _step_on(arithmetic: str, num_learners: int, workload: Workload) -> Step:
    dtype = torch.bfloat16 if arithmetic == "bf16 weights" else torch.float32
    # vmap knows no channels-last layout.
    feed = DeviceFeed(workload, num_learners * workload.batch_size, dtype, channels_last=False)

    def batches() -> tuple[Tensor, Tensor]:
        images, labels = feed.take(feed.next_picks())
        return images.view(num_learners, -1, *images.shape[1:]), labels.view(num_learners, -1)

    models = [workload.make_model().to(workload.device) for _ in range(num_learners)]
    return vmap_step(models, batches, arithmetic)


def vmap_step(models: Sequence[nn.Module], batches: Batches, arithmetic: str) -> Step:
    """A training step of K models of one architecture, which keep their weights: the step has stacked copies.

    Args:
        models: on the device where they are trained.
        batches: gives inputs [K, B, ...] and labels [K, B].
        arithmetic: fp32 (as the models are), autocast, or bf16 weights.
    """
    parameters, buffers, update = _stacked(models, arithmetic)
    skeleton = copy.deepcopy(models[0]).to("meta")
    device_type = next(iter(parameters.values())).device.type

    def loss_of(
        parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=arithmetic == "autocast"):
            output = functional_call(skeleton, (parameters, buffers), (inputs,))
        return nn.functional.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), labels)

    # Every model draws dropout masks of its own.
    gradients_of = vmap(grad(loss_of), randomness="different")

    def step() -> None:
        gradients = gradients_of(parameters, buffers, *batches())
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        update()

    return step


def _stacked(
    models: Sequence[nn.Module], arithmetic: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], Callable[[], None]]:
    """Parameters and buffers [K, ...] by name, and what steps the parameters by their `.grad`."""
    stacked, buffers = stack_module_state(list(models))
    # Without autograd of their own, which would record what `grad` does.
    masters = {name: parameter.detach() for name, parameter in stacked.items()}
    if arithmetic != "bf16 weights":
        return masters, buffers, plain_update(list(masters.values()), _SGD)
    parameters = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    statistics = {name: b.to(torch.bfloat16) if b.is_floating_point() else b for name, b in buffers.items()}
    return parameters, statistics, master_update(list(parameters.values()), list(masters.values()), _SGD)
