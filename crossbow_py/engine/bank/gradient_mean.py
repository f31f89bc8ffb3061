"""Gradients averaged over groups of learners, for learners to step by alike; `GradientMean` says who with whom."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from crossbow_py.averaging.rule import GradientMean
from crossbow_py.distributed.collective import Collective

if TYPE_CHECKING:
    from crossbow_py.engine.bank.replicas import ReplicaBank


@torch.no_grad()
def average_gradients(bank: ReplicaBank, mean: GradientMean, collective: Collective) -> None:
    """G_j ← Σ_i G_i / n over the n learners i of j's group, summed in learner order, to the bit alike in their rows.

    Enqueued on the current stream; the host waits only where the collective makes it. `bank.total` is scratch where
    several devices average.
    """
    for group in mean.groups(bank.num_learners):
        first, *others = (bank.gradients.trained(learner) for learner in group)
        for own in others:
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


def align_groups(bank: ReplicaBank, before: Sequence[range] = ()) -> None:
    """Weights, optimizer state and step count of one learner in every group become those of all in it.

    Groups have other borders once learners have come or gone, and where memory ran out some may have stepped alone.
    With the groups there were `before`, the one is chosen so that as many of them as there may be go on.
    """
    known = sum(map(len, before))
    for number, group in enumerate(bank.gradient_groups):
        own = before[number] if number < len(before) else range(known, bank.num_learners)
        chosen = next((learner for learner in group if learner in own), group[0])
        for learner in group:
            if learner != chosen:
                for rows in (bank.weights, *bank.state.values()):
                    rows.copy_row(learner, rows, chosen)
                bank.step_counts[learner] = bank.step_counts[chosen]
                bank.refresh_shadow(learner)


def lost(bank: ReplicaBank, sick: Collection[int]) -> list[int]:
    """Those of the sick learners whose weights are lost, as nobody healthy shares their gradients."""
    groups = [] if bank.replicas_alike else bank.gradient_groups
    return [learner for group in groups if all(other in sick for other in group) for learner in group]
