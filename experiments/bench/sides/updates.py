"""The SGD step of all sides but this project's: torch's own, on float32 or on bfloat16 with float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from crossbow_py.engine.modules.precision import cast_module, choose_precision
from experiments.bench.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY

Update = Callable[[], None]


def plain_update(parameters: Sequence[Tensor], sgd: str) -> Update:
    """Steps the parameters by their `.grad`, and forgets it."""
    optimizer = _optimizer(parameters, sgd)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def bf16_update(model: nn.Module, sgd: str) -> Update:
    """Casts the model to bfloat16 (BatchNorm stays), and steps float32 masters of it, which are then copied back."""
    parameters: list[Tensor] = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    cast_module(model, choose_precision("bf16", masters[0].device))
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = _optimizer(masters, sgd)

    @torch.no_grad()
    def update() -> None:
        torch._foreach_copy_(gradients, [_gradient(parameter) for parameter in parameters])
        optimizer.step()
        torch._foreach_copy_(parameters, masters)
        for parameter in parameters:
            parameter.grad = None

    return update


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad


def _optimizer(parameters: Sequence[Tensor], sgd: str) -> torch.optim.SGD:
    return torch.optim.SGD(
        list(parameters),
        LEARNING_RATE,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        foreach=sgd == "foreach",
        fused=sgd == "fused",
    )
