"""Three ordinary models, and a bank that holds the same: what its graph gives is compared with each of them alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.engine.bank.frozen_base import frozen_values
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import FP64, Precision
from tests.support import CPU

K = 3


def three_of(template: nn.Module, low: float, high: float) -> list[nn.Module]:
    """Copies with weights of their own."""
    models = [copy.deepcopy(template) for _ in range(K)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.uniform_(low, high)
    return models


class Trio:
    """The models, and their bank."""

    def __init__(self, models: Sequence[nn.Module], precision: Precision = FP64, **options: Any) -> None:
        same = len({frozen_values(model) for model in models}) == 1
        self.models, options = models, {"order": "blocks", "shares_base": same, **options}
        template = copy.deepcopy(models[0])
        self.bank = ReplicaBank(template, K, device=CPU, precision=precision, state_names=(), **options)
        for learner, model in enumerate(models):
            self.bank.load_learner(learner, model)

    def graph(self, example: Tensor) -> FusedGraph:
        """In the models' mode."""
        return FusedGraph(self.bank.template, example, self.bank, training=self.models[0].training)

    def check(self, graph: FusedGraph, inputs: Tensor, *, shared: bool = False, tolerance: float = 1e-9) -> None:
        """Values, gradients in training mode, and buffers of one run against those of the models.

        Args:
            graph: that of the bank.
            inputs: a batch for all `[B, ...]` when shared, else one each `[K, B, ...]`.
            shared: whether all take the same.
            tolerance: relative and absolute.
        """
        near = {"rtol": tolerance, "atol": tolerance}
        ours = graph.run(inputs.clone(), shared)
        batches = [inputs] * K if shared else list(inputs)
        theirs = [model(batch.clone()) for model, batch in zip(self.models, batches, strict=True)]
        torch.testing.assert_close(ours.detach(), torch.stack(theirs).detach(), **near)
        for learner, model in enumerate(self.models):
            state = self.bank.learner_state(learner)
            for name, buffer in model.named_buffers():
                torch.testing.assert_close(state[name], buffer, **near)
        if not self.models[0].training:
            assert not ours.requires_grad
            return
        cotangent = torch.randn_like(ours)
        found = dict(zip(graph.trained, _gradients(ours, cotangent, list(graph.trained.values())), strict=True))
        for learner, (model, output) in enumerate(zip(self.models, theirs, strict=True)):
            parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
            expected = _gradients(output, cotangent[learner], list(parameters.values()))
            for name, gradient in zip(parameters, expected, strict=True):
                torch.testing.assert_close(found[name][learner], gradient.to_dense(), **near)


def _gradients(outputs: Tensor, cotangent: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    if not outputs.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    found = torch.autograd.grad((outputs * cotangent).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
