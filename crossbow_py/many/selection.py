"""Ensemble selection: which models predict best together.

Caruana et al., "Ensemble selection from libraries of models", ICML 2004.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def greedy_selection(predictions: Tensor, losses_of: Callable[[Tensor], Sequence[float]], most: int) -> list[int]:
    """Return the models, by number, whose mean prediction has the least loss that a greedy search finds.

    Each step adds the model after which the loss is the least, also one that is there already, which then weighs more.
    What is returned ends where the loss was the least.

    Args:
        predictions: those of M models, [M, N, ...].
        losses_of: the losses of M mean predictions [M, N, ...].
        most: steps.
    """
    total, chosen, least, length = torch.zeros_like(predictions[0]), list[int](), math.inf, 1
    for count in range(1, most + 1):
        losses = [own if math.isfinite(own) else math.inf for own in losses_of((total + predictions) / count)]
        best = min(range(len(losses)), key=losses.__getitem__)
        chosen.append(best)
        total += predictions[best]
        if losses[best] < least:
            least, length = losses[best], count
    return chosen[:length]
