"""How far a bank's learners are from their average model, and how far it moved. Host–device synchronisations, all."""

from __future__ import annotations

import math

import torch

from crossbow_py.engine.central import norm
from crossbow_py.engine.replicas import ReplicaBank


def spread(bank: ReplicaBank) -> float | None:
    """Root mean square over the learners here of |w_j − z| / |z|, trained blocks alone; None with one learner."""
    if bank.is_single:
        return None
    z, learners = bank.z.trained(), range(bank.num_learners)
    distances = [norm(torch._foreach_sub(bank.weights.trained(j), z)) for j in learners]
    return math.sqrt(sum(distance**2 for distance in distances) / bank.num_learners) / norm(z)


def correction_norm(bank: ReplicaBank) -> float | None:
    """|share · Σ_j c_j| of the last round that averaged; None with one learner, or with replicas alike."""
    if bank.is_single or bank.replicas_alike:
        return None
    return norm(bank.total.trained()) if bank.total_squares is None else math.sqrt(float(bank.total_squares.sum()))
