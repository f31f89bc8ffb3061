"""The sum over devices: one all-reduce of a `[P]` vector a round, or nothing on a single device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from crossbow_py.core.errors import RankLostError
from crossbow_py.distributed.idle_clock import IdleClock
from crossbow_py.distributed.watch import Watch


class Collective:
    """The sum on a single device, which does nothing. Base of the sum over devices.

    Rounds' sums start on the executor's averaging stream, in the order of rounds. The training loop's thread calls this
    only after a drain or a close, when no sum is in flight: for a round that the device skips, and for z over nodes.

    Attributes:
        num_devices: devices that sum together.
        apart: whether each node sums by itself, so that z differs between nodes except after `mean_over_nodes`.
        num_sums: how often `all_reduce_sum` was started; stays 0 on one device.
        idle: counts the time in which this rank only waits for others; None on one device.
    """

    num_devices = 1
    apart = False
    num_sums = 0
    idle: IdleClock | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether there is nothing to sum, so that a round's sums and its step of z may be one pass."""
        return self.num_devices == 1 and not self.apart

    def all_reduce_sum(self, values: Tensor) -> None:
        """Set values ← Σ over devices, in place, the same on every device."""

    def mean_over_nodes(self, values: Tensor) -> None:
        """Set values ← mean over all devices, in place, if nodes are apart."""

    def awaiting(self) -> AbstractContextManager[None]:
        """Return a context for waiting, on the host, for a stream that sums."""
        return nullcontext()


class ProcessGroupCollective(Collective):
    """All-reduce over a torch.distributed process group (NCCL on GPUs, gloo on CPUs), by default over all ranks.

    Args:
        group: the devices that sum every round; None for the default group.
        num_devices: the size of that group; None asks torch.distributed.
        watch: told when the calling thread waits for other ranks.
        world: the group of all nodes' devices, if `group` is one node's.
        num_ranks: the size of `world`.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        num_devices: int | None = None,
        watch: Watch | None = None,
        world: ProcessGroup | None = None,
        num_ranks: int = 0,
    ) -> None:
        self.num_devices = torch.distributed.get_world_size() if num_devices is None else num_devices
        self.apart, self.num_sums = world is not None, 0
        self._group, self._world, self._num_ranks, self._watch = group, world, num_ranks, watch
        self._blocks = torch.distributed.get_backend(group) == "gloo"
        if watch is not None:
            self.idle = watch.idle
            watch.has_nccl = watch.has_nccl or not self._blocks

    def all_reduce_sum(self, values: Tensor) -> None:
        """See Collective. Blocks the calling thread with gloo; with NCCL it is enqueued on the current stream.

        The first NCCL call also blocks, until all ranks have reached it, as it sets up the communicator. Raises
        RankLostError if another rank is gone.
        """
        self.num_sums += 1
        self._reduce(values, self._group)

    def mean_over_nodes(self, values: Tensor) -> None:
        """See Collective. Blocks and raises as `all_reduce_sum`."""
        values.div_(self._num_ranks)
        self._reduce(values, self._world)

    def awaiting(self) -> AbstractContextManager[None]:
        # There is nothing to wait for with gloo, as its calls block.
        return nullcontext() if self._blocks or self._watch is None else self._watch.waiting(on_device=True)

    def _reduce(self, values: Tensor, group: ProcessGroup | None) -> None:
        try:
            with self._watch.waiting(on_device=not self._blocks) if self._watch else nullcontext():
                torch.distributed.all_reduce(values, group=group)
        except RuntimeError as error:
            raise RankLostError from error
