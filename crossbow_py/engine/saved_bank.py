"""What is known of a bank's `state_dict()` without a bank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CENTRAL = ("z", "z_prev", "velocity")  # what is no learner's; the last where the averaging rule keeps one


def num_saved(saved: Mapping[str, Any]) -> int:
    """How many learners a bank's `state_dict()` has. Raises ValueError when it is not one."""
    number, counts = saved["num_learners"], saved["step_counts"]
    if not number or len(counts) != number or any(type(count) is not int for count in counts):
        raise ValueError(f"{number!r} learners with the step counts {counts!r}")
    return len(counts)
