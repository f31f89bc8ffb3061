"""The bases of torch.cuda's Stream, Event and CUDAGraph, which `torch._C` has in CUDA builds, on a simulated device."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import wraps

import torch

from tests.simulated_cuda.scheduler import CudaError, Event
from tests.simulated_cuda.torch_cuda import process, simulation

_POOLS = itertools.count(1)


def raising(function):
    """Errors of the runtime as torch raises them."""

    @wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except CudaError as error:
            raised = torch.AcceleratorError(str(error))
            raised.error_code = error.code
            raise raised from None

    return called


def new_pool():
    """A name for a graph's pool of memory that no other has."""
    return 0, next(_POOLS)


class CudaStream(torch._C.Stream):
    """A stream of the pool, or by number."""

    def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0, **_):
        torch.cuda._lazy_init()
        if stream_id or device_index or device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, device=torch.device("cuda", process.library.sim_device()), priority=priority)

    def __init__(self, *args, **kwargs):
        """Ignore what `__new__` has taken."""

    @property
    def cuda_stream(self):
        return self.stream_id

    @property
    def own(self):
        return simulation().scheduler.stream(self.device_index, self.stream_id)

    @raising
    def query(self):
        return simulation().scheduler.query_stream(self.own)

    @raising
    def synchronize(self):
        simulation().scheduler.synchronize_stream(self.own)


class CudaEvent:
    """An event, which knows when it was passed if it was made to."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        made = super().__new__(cls)
        made.timing, made.event, made.device = enable_timing, Event(external), None
        made.cuda_event = id(made.event)
        return made

    def __init__(self, *args, **kwargs):
        """Ignore what `__new__` has taken."""

    @raising
    def record(self, stream):
        simulation().scheduler.record(self.event, stream.own)

    @raising
    def wait(self, stream):
        simulation().scheduler.wait(stream.own, self.event)

    @raising
    def query(self):
        return simulation().scheduler.query(self.event)

    @raising
    def synchronize(self):
        simulation().scheduler.synchronize_event(self.event)

    def elapsed_time(self, end):
        if not (self.timing and end.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.event.time_s is None or end.event.time_s is None:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return (end.event.time_s - self.event.time_s) * 1000


class CudaGraph:
    """A graph: captured on a stream into a pool of memory, and replayed on any stream."""

    def __new__(cls, keep_graph=False):
        made = super().__new__(cls)
        made._graph = made._pool = made._capture = None
        return made

    def __init__(self, *args, **kwargs):
        """Ignore what `__new__` has taken."""

    @raising
    def capture_begin(self, pool=None, capture_error_mode="global"):
        sim = simulation()
        stream = sim.operators.current_stream()
        self._pool = pool or new_pool()
        memory = sim.memories[stream.device]
        self._capture = sim.scheduler.begin_capture(stream, self._pool, capture_error_mode)
        memory.pools[self._pool] = memory.pools.get(self._pool, 0) + 1
        memory.underway.append(self._pool)
        self._memory, self._stream = memory, stream

    @raising
    def capture_end(self):
        sim = simulation()
        stream = sim.operators.current_stream()
        if stream is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        graph = sim.scheduler.end_capture(stream)  # if it raises, the allocator believes for good that it goes on
        self._memory.underway.remove(self._pool)
        self._graph, self._draws = graph, self._capture.draws
        sim.operators.return_freed()
        pinned = sim.memories["pinned"]
        self._held, self._pinned = self._memory.held_by(graph, self._pool), pinned.frees.of_blocks_of(graph)

    @raising
    def replay(self):
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        sim = simulation()
        sim.operators.return_freed()
        if self._memory.frees.since(self._held) or sim.memories["pinned"].frees.since(self._pinned):
            name = f"graph of {self._graph.name}"
            sim.scheduler.races.found[name, "freed"] = f"{name} uses memory that was freed since its capture"
        sim.scheduler.replay(self._graph, sim.operators.current_stream(), self._drawing())

    def _drawing(self):
        if self._draws is None:
            return None
        generator = torch.cuda.default_generators[self._stream.device]
        base = generator.initial_seed(), generator.get_offset()
        generator.set_offset(base[1] + self._draws["count"])
        return lambda: self._draws.update(base=base)

    def reset(self):
        if self._pool is not None and self._capture is not None:
            with simulation().scheduler.lock:
                self._memory.pools[self._pool] -= 1
        self._graph = self._capture = None

    def __del__(self):
        with suppress(Exception):  # the interpreter may be on its way out
            self.reset()

    def pool(self):
        return self._pool

    def register_generator_state(self, generator):
        """Need nothing: generators other than the default one are refused in captures."""
