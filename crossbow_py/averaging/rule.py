"""What an averaging rule declares: coefficients on (w, z), what is summed over learners, what is all-reduced and when.

A rule whose round is linear in (w, z) returns a `LinearRound`; the engine then applies, for K learners on all devices,

    c_j  ← correction · (w_j − z)                 per learner, from the weights before its gradient step
    w_j  ← (gradient step of w_j) − c_j
    s    ← Σ_j c_j                                summed on the device in learner order, then one all-reduce of [P]
    z'   ← z + s + momentum · (z − z_prev)        alike on every device; z_prev ← z

in every round for which it returns one. With a `node_period` H > 1 that is done by each node for itself, K and the
sum being the node's, and in every H-th of these rounds

    z ← mean of z over nodes; z_prev ← mean of z_prev over nodes

A rule that is not linear in (w, z) overrides `corrections` and `average`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearRound:
    """Coefficients of one round that averages."""

    correction: float
    momentum: float


class AveragingRule(ABC):
    """Base of every rule. Frozen settings, no state: z and z_prev belong to the bank."""

    GROUP: ClassVar[str] = "averaging"
    NAME: ClassVar[str]
    has_central_model: ClassVar[bool]  # and so: learners share an epoch's samples out among them
    restart_on_drop: bool = False
    restart_momentum: str = "reset"
    averaging_period: int = 1
    node_period: int = 1  # beyond 1, nodes average for themselves and z differs between them
    batch_norm: str = "mean"
    recalibration_batches: int = 0

    @abstractmethod
    def linear_round(self, round_index: int, num_learners: int) -> LinearRound | None:
        """Coefficients for this round, or None when nothing is averaged in it."""

    def joins_nodes(self, round_index: int) -> bool:
        """Whether z is averaged over nodes after this round, which averages, where each has its own meanwhile."""
        return self.node_period > 1 and (round_index + 1) // self.averaging_period % self.node_period == 0

    def corrections(self, out: list[Tensor], weights: list[Tensor], z: list[Tensor], coefficients: LinearRound) -> None:
        """Write c_j = correction · (w_j − z) of one learner into `out`; all are lists of vectors, side by side."""
        torch._foreach_copy_(out, weights)
        torch._foreach_sub_(out, z)
        torch._foreach_mul_(out, coefficients.correction)

    def average(
        self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], coefficients: LinearRound
    ) -> None:
        """Move z by the all-reduced sum of corrections `total`, in place; afterwards z_prev is the old z."""
        step = list(torch._foreach_sub(z, z_prev))
        torch._foreach_mul_(step, coefficients.momentum)
        torch._foreach_add_(step, total)
        torch._foreach_copy_(z_prev, z)
        torch._foreach_add_(z, step)
