"""The sum over devices: one all-reduce of a `[P]` vector a round, or nothing on a single device."""

from __future__ import annotations

import torch.distributed
from torch import Tensor


class Collective:
    """One device: sums are already global. Base of the real ones; called from the averaging stream only."""

    num_devices = 1

    def all_reduce_sum(self, values: Tensor) -> None:
        """values ← Σ over devices, in place, alike on every device."""


class ProcessGroupCollective(Collective):
    """All-reduce over torch.distributed's default process group (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self) -> None:
        self.num_devices = torch.distributed.get_world_size()

    def all_reduce_sum(self, values: Tensor) -> None:
        """Blocks the calling thread with gloo; with NCCL it is enqueued on the current stream."""
        torch.distributed.all_reduce(values)
