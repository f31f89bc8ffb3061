"""Forward and backward of all learners in one pass over the fused graph, without a word from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbow_py.data.feed import Batch
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.rounds import Round, RoundTasks

_IGNORED = -100  # targets that cross_entropy leaves out of its mean


class Learned(NamedTuple):
    """Of all learners: losses `[K]`, right predictions `[K]` if there are classes, and gradients `[K, *shape]`."""

    losses: Tensor
    num_correct: Tensor | None
    gradients: Sequence[Tensor | None]


class FusedPass:
    """The learning tasks of a round. Dropout draws from the learners' generators: seed them first.

    Raises FusionError for models it cannot run.
    """

    def __init__(self, tasks: RoundTasks) -> None:
        self._tasks = tasks
        self.graph = FusedGraph(tasks.bank.template, tasks.feed.batch(0).inputs, tasks.bank)

    def batch(self, plan: Round) -> Batch:
        """The round's batches `[K, B, ...]`, or `[B, ...]` where all learners take the same."""
        feed = self._tasks.feed
        return feed.batch(plan.starts[0]) if is_shared(plan) else feed.batches(plan.starts)

    def learn(self, batch: Batch, shared: bool) -> Learned:
        """Losses and their gradients at the learners' weights."""
        bank = self._tasks.bank
        outputs = self.graph.run(batch.inputs, shared).to(bank.precision.master)
        targets = batch.targets.expand(bank.num_learners, *batch.targets.shape) if shared else batch.targets
        losses = self._losses(outputs, targets)
        parameters = list(self.graph.parameters.trained.values())
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        return Learned(losses.detach(), _count_correct(outputs.detach(), targets), gradients)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss a learner `[K]`; cross-entropy of classes in one call, any other in a loop."""
        if self._tasks.loss is nn.functional.cross_entropy and outputs.ndim == 3 and targets.ndim == 2:
            each = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
            return each.view(targets.shape).sum(1) / (targets != _IGNORED).sum(1)
        pairs = zip(outputs.unbind(), targets.unbind(), strict=True)
        return torch.stack([self._tasks.loss(output, target).reshape(()) for output, target in pairs])


def is_shared(plan: Round) -> bool:
    """Whether all learners take the same batch."""
    return len(set(plan.starts)) == 1


def _count_correct(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Right predictions of each learner; None where the task is not classification."""
    if outputs.ndim != 3 or targets.ndim != 2 or targets.is_floating_point():
        return None
    return (outputs.argmax(2) == targets).sum(1)
