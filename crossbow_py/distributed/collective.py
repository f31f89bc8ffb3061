"""The sum over devices: one all-reduce of a `[P]` vector a round, or nothing on a single device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from crossbow_py.core.errors import RankLostError


class Waits(Protocol):
    """Who is told that a thread waits for other ranks."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around an operation that ends once all ranks have come to it."""


class Collective:
    """One device: sums are already global. Base of the real ones.

    Sums of rounds begin on the executor's averaging stream, in the order of rounds. The training loop's thread calls it
    only after a drain or a close, when none is in flight: for a round the device sits out, and for z over nodes.

    Attributes:
        num_devices: that sum together.
        apart: whether nodes sum for themselves, and z differs between them but after `mean_over_nodes`.
        num_sums: how often `all_reduce_sum` was begun; stays 0 on one device, where nobody waits for a sum.
    """

    num_devices = 1
    apart = False
    num_sums = 0

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to do: a round's sums and its step of z may be one pass."""
        return self.num_devices == 1 and not self.apart

    def all_reduce_sum(self, values: Tensor) -> None:
        """values ← Σ over devices, in place, alike on every device."""

    def mean_over_nodes(self, values: Tensor) -> None:
        """values ← mean over all devices, in place, where nodes are apart."""

    def awaiting(self) -> AbstractContextManager[None]:
        """Around waiting, on the host, for a stream that sums."""
        return nullcontext()


class ProcessGroupCollective(Collective):
    """All-reduce over a torch.distributed process group (NCCL on GPUs, gloo on CPUs), by default over all ranks.

    Args:
        group: the devices that sum every round; None is the default group.
        num_devices: how many they are; None asks torch.distributed.
        watch: is told when the calling thread waits for other ranks.
        world: of all nodes' devices, where `group` is one node's.
        num_ranks: how many these are.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        num_devices: int | None = None,
        watch: Waits | None = None,
        world: ProcessGroup | None = None,
        num_ranks: int = 0,
    ) -> None:
        self.num_devices = torch.distributed.get_world_size() if num_devices is None else num_devices
        self.apart, self.num_sums = world is not None, 0
        self._group, self._world, self._num_ranks, self._watch = group, world, num_ranks, watch
        self._blocks = torch.distributed.get_backend(group) == "gloo"

    def all_reduce_sum(self, values: Tensor) -> None:
        """Blocks the calling thread with gloo; with NCCL it is enqueued on the current stream.

        The first one with NCCL blocks as well, until all ranks have come to it, as it sets up the communicator.
        Raises RankLostError when another rank is gone.
        """
        self.num_sums += 1
        self._reduce(values, self._group)

    def mean_over_nodes(self, values: Tensor) -> None:
        """See Collective; as `all_reduce_sum`."""
        values.div_(self._num_ranks)
        self._reduce(values, self._world)

    def awaiting(self) -> AbstractContextManager[None]:
        """See Collective; gloo's own calls wait."""
        return nullcontext() if self._blocks or self._watch is None else self._watch.waiting()

    def _reduce(self, values: Tensor, group: ProcessGroup | None) -> None:
        try:
            with self._watch.waiting() if self._watch else nullcontext():
                torch.distributed.all_reduce(values, group=group)
        except RuntimeError as error:
            raise RankLostError from error
