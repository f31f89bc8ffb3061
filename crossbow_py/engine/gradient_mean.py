"""Gradients averaged over groups of learners, in place, for learners to step by; `GradientMean` says who with whom."""

from __future__ import annotations

import torch

from crossbow_py.averaging.collective import Collective
from crossbow_py.averaging.rule import GradientMean
from crossbow_py.engine.replicas import ReplicaBank


@torch.no_grad()
def average_gradients(bank: ReplicaBank, mean: GradientMean, collective: Collective, *, sits_out: bool = False) -> None:
    """G_j ← Σ_i G_i / n over the n learners i of j's group, summed in learner order, to the bit alike in their rows.

    Enqueued on the current stream; the host waits only where the collective makes it. `bank.total` is scratch where
    several devices average. A device that sits out adds nothing, and gets the mean.
    """
    for group in mean.groups(bank.num_learners):
        first, *others = (bank.gradients.trained(learner) for learner in group)
        if sits_out:
            torch._foreach_zero_(first)
        for own in () if sits_out else others:
            torch._foreach_add_(first, own)
        count = len(group)
        if mean.group_size is None and collective.num_devices > 1:
            count *= collective.num_devices
            total = bank.total.trained()
            torch._foreach_copy_(total, first)
            collective.all_reduce_sum(bank.total.storage)
            torch._foreach_copy_(first, total)
        torch._foreach_div_(first, float(count))
        for own in others:
            torch._foreach_copy_(own, first)
