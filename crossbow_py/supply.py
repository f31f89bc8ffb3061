"""How many worker processes load the data of a run."""

from __future__ import annotations

import os
from typing import Literal

import torch

# What `auto` begins with: enough to keep one GPU busy on most data, and on CPUs as few as can be, for learners need
# the cores. Training corrects it from what it measures.
_FIRST_ON_CUDA, _FIRST_ON_CPU = 8, 1


def first_workers(asked: int | Literal["auto"], device: torch.device) -> int:
    """With how many a run begins."""
    if asked != "auto":
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_FIRST_ON_CUDA, max(1, cores - 1)) if device.type == "cuda" else _FIRST_ON_CPU
