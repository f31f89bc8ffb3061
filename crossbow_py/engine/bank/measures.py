"""How far a bank's learners are from their average model, and how far it moved. Host–device synchronisations, all."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from crossbow_py.engine.bank.central import norm
from crossbow_py.engine.bank.layout import Rows
from crossbow_py.engine.bank.replicas import ReplicaBank


def squared_distances(bank: ReplicaBank, center: Rows | None = None, without: Collection[int] = ()) -> list[float]:
    """|w_j − c|² / |c|² of each learner j here, those in `without` left out, trained blocks alone; c is z by default.

    Empty where c is zero.
    """
    values = (center or bank.z).trained()
    length = norm(values)
    learners = [learner for learner in range(bank.num_learners) if learner not in without]
    distances = [norm(torch._foreach_sub(bank.weights.trained(j), values)) for j in learners if length]
    return [(distance / length) ** 2 for distance in distances]


def correction_norm(bank: ReplicaBank) -> float | None:
    """|share · Σ_j c_j| of the last round that averaged; None with one learner, or with replicas alike."""
    if bank.is_single or bank.replicas_alike:
        return None
    return norm(bank.total.trained()) if bank.total_squares is None else math.sqrt(float(bank.total_squares.sum()))
