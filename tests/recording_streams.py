"""Devices without a GPU for executor=streams: one logs what it is asked for, one runs it in any allowed order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.engine.device.graphs import CudaStreams, WaitBetween


class OnlyLaunches(TorchDispatchMode):
    """Raises where a CUDA graph could not hold what is done: random numbers, values for the host or from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert func is not aten._local_scalar_dense.default, "the host asked for a value"
        assert func is not aten.lift_fresh.default, "a value came from the host"
        attention = "scaled_dot_product" in str(func)  # which draws for its own dropout alone
        assert attention or torch.Tag.nondeterministic_seeded not in func.tags, f"{func} draws random numbers"
        return func(*args, **(kwargs or {}))


def in_graph(body):
    """The body, refused where a graph could not hold it."""

    def captured():
        with OnlyLaunches():
            body()

    return replace(body, first=in_graph(body.first), second=in_graph(body.second)) if halved(body) else captured


def halved(body):
    """Whether something comes between two halves of a body."""
    return isinstance(body, WaitBetween)


class OnHost(CudaStreams):
    """What both have in common: memory and generators of the host, and no pools."""

    def new_pool(self):
        return None

    def give_back(self, stream, high_priority=False):
        """Streams of tests are objects, of which there are enough."""

    def release(self, graph):
        self.log.append(f"release {graph.name}")

    def host_values(self, *shape):
        return torch.zeros(shape, dtype=torch.float64)

    def _device_random_state(self):
        return torch.zeros(0, dtype=torch.uint8)


@dataclass(frozen=True)
class KeptGraph:
    name: str
    body: object


@dataclass(eq=False)
class Mark:
    """An event: what it marks now."""

    label: str | None = None


@dataclass(eq=False)
class Moment:
    """A timed mark: when the device passed it, in milliseconds of its clock; None before that."""

    device: object
    time_ms: float | None = None

    def query(self):
        return self.time_ms is not None

    def synchronize(self):
        self.device.pass_moment(self)

    def elapsed_time(self, end):
        assert self.query() and end.query(), "a mark was read before the device had passed it"
        return end.time_ms - self.time_ms


class RecordingStreams(OnHost):
    """Does everything at once, and logs it. Streams are s0, s1, ... and `high`; s0#2 is the second record on s0.

    Its clock goes on by a millisecond with everything it runs.
    """

    def __init__(self):
        self.log, self._num_streams, self._num_records, self.clock_ms = [], 0, {}, 0.0

    def new_stream(self, high_priority=False):
        if high_priority:
            return "high"
        self._num_streams += 1
        return f"s{self._num_streams - 1}"

    def callers_stream(self):
        return "caller"

    def new_event(self, for_graphs=False):
        return Mark()

    def record(self, event, stream):
        self._num_records[stream] = self._num_records.get(stream, 0) + 1
        event.label = f"{stream}#{self._num_records[stream]}"
        self.log.append(f"{stream} record {event.label}")

    def wait(self, stream, event):
        self.log.append(f"{stream} wait {event.label}")

    def timed_mark(self, stream):
        self.log.append(f"{stream} time")
        return Moment(self, self.clock_ms)

    def pass_moment(self, moment):
        """Everything has been done at once."""

    def run(self, name, body, stream):
        self.log.append(f"{stream} run {name}")
        self.clock_ms += 1
        body()

    def capture(self, name, body, stream, pool):
        self.log.append(f"{stream} capture {name}")
        return KeptGraph(name, in_graph(body))

    def replay(self, graph, stream):
        self.log.append(f"{stream} replay {graph.name}")
        self.clock_ms += 1
        graph.body()

    def is_over(self, event):
        return True

    def synchronize_event(self, event):
        self.log.append(f"host wait {event.label}")

    def synchronize(self):
        self.log.append("host wait all")


@dataclass(eq=False)
class Counter:
    """An event: how often a record was asked for, and how many of them are done."""

    asked: int = 0
    done: int = 0


@dataclass(eq=False)
class Queue:
    """A stream: what is still to do, each a function that does it and says whether it could."""

    entries: deque = field(default_factory=deque)


class ShuffledStreams(OnHost):
    """Keeps everything for later, as a GPU does, and goes on with a stream drawn at random whenever the host waits.

    Only stream order and events hold anything back, so work that is not ordered by them runs in orders a scheduler
    would not choose. `deaf` leaves out every wait: what the orders are worth then.
    """

    def __init__(self, seed, deaf=False):
        self.log, self._random, self._deaf, self._clock_ms = [], random.Random(seed), deaf, 0.0
        self._caller, self._streams = Queue(), []

    def new_stream(self, high_priority=False):
        self._streams.append(Queue())
        return self._streams[-1]

    def callers_stream(self):
        return self._caller

    def new_event(self, for_graphs=False):
        return Counter()

    def record(self, event, stream):
        event.asked += 1
        number = event.asked

        def mark():
            event.done = number
            return True

        if stream is self._caller:
            mark()
        else:
            stream.entries.append(mark)

    def wait(self, stream, event):
        number = event.asked
        stream.entries.append(lambda: self._deaf or event.done >= number)

    def timed_mark(self, stream):
        moment = Moment(self)

        def mark():
            moment.time_ms = self._clock_ms
            return True

        stream.entries.append(mark)
        return moment

    def pass_moment(self, moment):
        while not moment.query():
            self._go_on()

    def run(self, name, body, stream):
        if halved(body):
            self.run(name, body.first, stream)
            if body.event is not None:
                self.wait(stream, body.event)
            body = body.second

        def work():
            self._clock_ms += 1
            body()
            return True

        stream.entries.append(work)

    def capture(self, name, body, stream, pool):
        return KeptGraph(name, in_graph(body))

    def replay(self, graph, stream):
        self.run(graph.name, graph.body, stream)

    def is_over(self, event):
        return event.done >= event.asked

    def synchronize_event(self, event):
        number = event.asked
        while event.done < number:
            self._go_on()

    def synchronize(self):
        while any(stream.entries for stream in self._streams):
            self._go_on()

    def _go_on(self):
        for stream in self._random.sample(self._streams, len(self._streams)):
            if stream.entries and stream.entries[0]():
                stream.entries.popleft()
                return
        raise AssertionError("every stream waits for another")
