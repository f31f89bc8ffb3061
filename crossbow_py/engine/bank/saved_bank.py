"""What is known of a bank's `state_dict()` without a bank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CENTRAL = ("z", "z_prev", "velocity")  # what is no learner's; the last where the averaging rule keeps one


def mean_weights(saved: Sequence[Mapping[str, Any]], sick: Sequence[Collection[int]]) -> dict[str, Tensor]:
    """The mean of the learners of several banks' `state_dict()`, without those of each that are sick."""
    rows = [[row for row in range(num_saved(one)) if row not in ill] for one, ill in zip(saved, sick, strict=True)]
    return {
        name: torch.cat([one["weights"][name][own] for one, own in zip(saved, rows, strict=True)]).mean(0)
        for name in saved[0]["weights"]
    }


def num_saved(saved: Mapping[str, Any]) -> int:
    """How many learners a bank's `state_dict()` has. Raises ValueError when it is not one."""
    number, counts = saved["num_learners"], saved["step_counts"]
    if not number or len(counts) != number or any(type(count) is not int for count in counts):
        raise ValueError(f"{number!r} learners with the step counts {counts!r}")
    return len(counts)
