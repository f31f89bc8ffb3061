"""NCCL between processes with simulated devices: collectives are enqueued on streams, and done by gloo on host memory.

As with torch's own, a group connects at its first collective, for which the host waits for the other ranks. A
collective runs on the current stream, or with `async_op=True` on a stream of the group, after what the current one has
to do by then; `wait` has the current stream wait for it, not the host. A rank that is gone leaves the others waiting,
as between GPUs of one host, until the watchdog ends the process when the group's time is over.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Work,
)

from tests.simulated_cuda.cuda_objects import raising
from tests.simulated_cuda.races import extent
from tests.simulated_cuda.scheduler import Collective, Event
from tests.simulated_cuda.torch_cuda import simulation

TIMEOUT = timedelta(minutes=10)
_LONGER = timedelta(minutes=5)  # gloo's own limit comes after the watchdog's


class Options:
    """The settings of a group that torch's Python reads and writes."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, TIMEOUT
        self.global_ranks_in_group, self.group_name = [], ""


class NcclWork(Work):
    """A collective that was launched. Keeps the tensor of an asynchronous one until it is waited for."""

    def __init__(self, event, device, kept, blocks_host):
        super().__init__()
        self._event, self._device, self._kept, self._blocks_host = event, device, kept, blocks_host

    @raising
    def wait(self, timeout=None):
        sim = simulation()
        sim.scheduler.wait(sim.operators.current_stream(self._device), self._event)
        self._kept = None
        if self._blocks_host:
            sim.scheduler.synchronize_event(self._event)
        return True

    synchronize = wait

    @raising
    def is_completed(self):
        return simulation().scheduler.query(self._event)


class ProcessGroupNCCL(ProcessGroup):
    """A rank's part of a group, with the operations that this package and its tests use."""

    Options = Options
    uid = -1

    def __init__(self, store, rank, size, options):
        super().__init__(rank, size)
        self._store, self.options = PrefixStore("simulated NCCL", store), options
        self._gloo, self._streams = None, {}

    def allreduce(self, tensors, opts):
        (tensor,) = tensors
        return self._of_tensor("all-reduce", tensor, opts, self._connected().allreduce)

    def broadcast(self, tensors, opts):
        (tensor,) = tensors
        return self._of_tensor("broadcast", tensor, opts, self._connected().broadcast)

    @raising
    def barrier(self, opts):
        gloo, device = self._connected(), simulation().operators.current_device()
        return self._launch(Collective("barrier", lambda: gloo.allreduce([torch.zeros(1)])), device, blocks_host=True)

    @raising
    def _of_tensor(self, name, tensor, opts, operation):
        if not tensor.is_cuda:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        simulation().operators.return_freed()
        memory, addresses = simulation().operators.on_host(tensor), list(filter(None, [extent(tensor)]))
        collective = Collective(name, lambda: operation([memory], opts), addresses, addresses)
        return self._launch(collective, tensor.device.index, tensor if opts.asyncOp else None)

    def _launch(self, collective, device, kept=None, blocks_host=False):
        sim = simulation()
        current = sim.operators.current_stream(device)
        stream = current if kept is None else self._stream(device).own
        if stream is not current:
            before = Event()
            sim.scheduler.record(before, current)
            sim.scheduler.wait(stream, before)
        event = sim.scheduler.share(stream, collective, self, self.options._timeout.total_seconds())
        return NcclWork(event, device, kept, blocks_host)

    def _stream(self, device):
        if device not in self._streams:
            priority = -1 if self.options.is_high_priority_stream else 0
            self._streams[device] = torch.cuda.Stream(device, priority=priority)
        return self._streams[device]

    def _connected(self):
        if self._gloo is None:
            limit = self.options._timeout + _LONGER
            self._gloo = ProcessGroupGloo(self._store, self.rank(), self.size(), timeout=limit)
            self._stream(simulation().operators.current_device())
        return self._gloo

    def shutdown(self):
        self.abort()

    def abort(self):
        """Give up what was launched and is not over. Does not wait for other ranks."""
        simulation().scheduler.abandon(self)

    # ---- what torch's Python calls beside

    def getBackendName(self):
        return "nccl"

    def _get_backend(self, device):
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    @property
    def _device_types(self):
        return [torch.device("cuda")]

    @property
    def supports_splitting(self):
        return False

    def _set_default_timeout(self, timeout):
        self.options._timeout = timeout

    def _set_sequence_number_for_group(self):
        """Need none: there is no desynchronisation report."""

    def _group_start(self):
        """Abort one group after another, which does not wait."""

    def _group_end(self):
        """See `_group_start`."""
