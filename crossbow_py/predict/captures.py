"""Functions of one tensor as CUDA graphs of which one runs at a time. Not one line of it has run on a GPU yet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from crossbow_py.core.errors import one_line
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.device.streams import CudaStreams, DeviceStreams, Event, Graph, Pool
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS, CaptureError
from crossbow_py.predict.recording import Forward

_NAME = "the models"


class Captures:
    """Captures functions, and has their calls follow on each other, whichever streams these are made on.

    So all graphs have one pool of memory: what one computes on its way, the next may overwrite. Branches of them may
    share streams, and with those the workspaces of libraries, for the same reason.

    Args:
        executor: named in errors.
        banks: whose models are called.
        device: for tests; by default CUDA, on the banks' device.
    """

    def __init__(self, executor: str, banks: Sequence[ReplicaBank], device: DeviceStreams | None = None) -> None:
        self._executor, self._banks = executor, banks
        self._device = device or CudaStreams(banks[0].device)
        self._stream = self._device.new_stream()
        self._begun, self._done = self._device.new_event(), self._device.new_event()
        self._pool: Pool = None
        self._graphs: list[Graph] = []

    def captured(self, run: Forward, inputs: Tensor) -> CapturedRun | OrderedRun:
        """`run` as a CUDA graph; as it is when it draws random numbers, which a graph would repeat. Blocks the host.

        Raises CaptureError for what a graph cannot hold.
        """
        device = self._device
        device.record(self._begun, device.callers_stream())
        for event in (self._begun, self._done):
            device.wait(self._stream, event)
        before = self._random_state()
        for _ in range(WARM_UP_ROUNDS):  # rules are settled, and libraries choose algorithms and allocate workspaces
            device.run(_NAME, lambda: _call(run, inputs), self._stream)
        device.synchronize()  # host–device synchronisation
        if self._random_state() != before:
            return OrderedRun(run, device, self._done)
        if not self._graphs:  # a pool that has lost its last graph takes no other
            self._pool = device.new_pool()
        own = CapturedRun(run, inputs.clone(), device, self._done)
        try:
            own.graph = device.capture(_NAME, own.body, self._stream, self._pool)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(self._executor, _NAME, one_line(error)) from error
        self._graphs.append(own.graph)
        return own

    def release(self, run: Forward) -> None:
        """Forget what `captured` gave; blocks the host until it has run. The pool's memory goes with its last graph."""
        if isinstance(run, CapturedRun):
            self._device.synchronize_event(self._done)  # host–device synchronisation
            self._graphs.remove(run.graph)
            self._device.release(run.graph)

    def _random_state(self) -> Hashable:
        """Of every generator an operator may draw from."""
        own = [generator.get_state() for bank in self._banks for generator in bank.generators]
        return self._device.random_state(), *(state.numpy().tobytes() for state in own)


class CapturedRun:
    """A function of one tensor whose `body` was captured once as `graph`, and is replayed.

    Args:
        run: what is captured; kept, as the graph reads tensors that are its own.
        inputs: what the graph reads; every call is given a tensor of their shape, format and memory order.
        device: what replays it.
        done: the end of the last call of any graph of the pool.
    """

    graph: Graph

    def __init__(self, run: Forward, inputs: Tensor, device: DeviceStreams, done: Event) -> None:
        self._run, self._inputs, self._outputs = run, inputs, inputs.new_empty(0)
        self._device, self._done = device, done

    def body(self) -> None:
        """What is captured."""
        self._outputs = self._run(self._inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        """A copy of the outputs. All on the current stream, the host does not wait."""
        device, stream = self._device, self._device.callers_stream()
        device.wait(stream, self._done)  # of the last call, which may have been made on another stream
        self._inputs.copy_(inputs)
        device.replay(self.graph, stream)
        outputs = self._outputs.clone()  # which the next call overwrites, maybe on another stream
        device.record(self._done, stream)
        return outputs


class OrderedRun:
    """A function of one tensor that runs as it is, after the last call and before the next; see `CapturedRun`."""

    def __init__(self, run: Forward, device: DeviceStreams, done: Event) -> None:
        self._run, self._device, self._done = run, device, done

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs. All on the current stream, the host does not wait."""
        stream = self._device.callers_stream()
        self._device.wait(stream, self._done)
        outputs = self._run(inputs)
        self._device.record(self._done, stream)
        return outputs


def _call(run: Forward, inputs: Tensor) -> None:
    run(inputs)
