"""The order in which a simulated device does its work: streams, events, captures and graphs, without torch.

Whatever a program enqueues is kept until the host waits for it, and done in an order that streams and events allow:

    earliest   as soon as it may be done
    latest     only when the host waits for it, and then only what it depends on
    random     at random moments, from streams at random

A program that waits for everything it depends on gets the same numbers by every order; one that does not, differs.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager

from tests.simulated_cuda.races import Races

ORDERS = ("earliest", "latest", "random")
REUSE = "reuse of memory"
_EAGERNESS = 0.5  # how likely a stream goes on by itself after a call of the host, with order=random
_PATIENCE_S = 0.005  # until a device goes on by itself with a collective, which other ranks may wait for
_LOOK_S = 0.0005  # between looks whether another rank has done its part


class CudaError(RuntimeError):
    """An error of the runtime, with its number. `torch_cuda.py` turns it into torch's own."""

    def __init__(self, code, message):
        super().__init__(f"CUDA error: {message}")
        self.code = code


def capture_error(message):
    return CudaError(900, message)


class Event:
    """A CUDA event: how often it was recorded, how many of the records have been passed, and where the last one is.

    A capture makes a node of a wait for an `external` one.
    """

    __slots__ = ("asked", "captured", "done", "external", "moment", "stream", "time_s")

    def __init__(self, external=False):
        self.asked, self.done, self.external = 0, 0, external
        self.stream = self.captured = None
        self.moment, self.time_s = {}, None


class Work:
    """A kernel, a copy or a fill, with the extents of memory that it reads and writes."""

    __slots__ = ("name", "reads", "run", "writes")

    def __init__(self, name, run, reads=(), writes=()):
        self.name, self.run, self.reads, self.writes = name, run, reads, writes


class Collective(Work):
    """Work that ranks do together. `run` begins it, and returns a handle that tells when it is over on this rank."""

    __slots__ = ("event", "group", "handle", "limit", "stream")


class _Never:
    def is_completed(self):
        return False


class Record:
    __slots__ = ("event", "number")

    def __init__(self, event, number):
        self.event, self.number = event, number


class Wait(Record):
    """Holds a stream back until a record of an event is passed."""

    __slots__ = ()


class NodeOfWait(Work):
    """Holds what follows it in a graph back until the record that was the event's last at the replay is passed."""

    __slots__ = ("event",)

    def __init__(self, event):
        super().__init__("wait in a graph", lambda: None, (), ())
        self.event = event


class Replay:
    """A graph that a stream runs: the nodes still to be done, and the record that each wait among them is for."""

    __slots__ = ("graph", "left", "numbers", "prepare", "stream")

    def __init__(self, graph, stream, prepare):
        self.graph, self.stream, self.prepare = graph, stream, prepare
        self.left, self.numbers = None, {node: node.work.event.asked for node in graph.waits}


class Node:
    __slots__ = ("after", "work")

    def __init__(self, work, after):
        self.work, self.after = work, after


class Graph:
    """What a capture recorded: nodes, each after others. Its replays are done one by one, as they were launched."""

    def __init__(self, nodes):
        self.nodes, self.replays, self.moment = nodes, deque(), {}
        self.name = nodes[0].work.name if nodes else "nothing"
        self.waits = [node for node in nodes if isinstance(node.work, NodeOfWait)]
        self.reads, self.writes = _extents(nodes)
        self.parts = self._parts()

    def _parts(self):
        """Waits, reads and writes by how many waits, one after another, a node comes after; all of none first."""
        if not self.waits:
            return [([], self.reads, self.writes)]
        num_waits, parts = {}, []
        for node in self.nodes:
            is_wait = isinstance(node.work, NodeOfWait)
            num_waits[node] = number = max((num_waits[each] for each in node.after), default=0) + is_wait
            parts += [([], []) for _ in range(number + 1 - len(parts))]
            parts[number][not is_wait].append(node)
        return [([wait.work.event for wait in waits], *_extents(others)) for waits, others in parts]


def _extents(nodes):
    works = [node.work for node in nodes]
    writes = {each: None for work in works for each in work.writes}
    return {each: None for work in works for each in work.reads if each not in writes}, writes


class Capture:
    """A capture under way: its nodes, and the streams that joined it, each with the nodes that its next one follows."""

    def __init__(self, origin, pool, thread):
        self.origin, self.pool, self.thread = origin, pool, thread
        self.nodes, self.last = [], {origin: frozenset()}
        self.steps = []  # the nodes, and between them what may be done with freed memory
        self.failure = self.draws = None  # draws: the random numbers it takes, set by the operators


class Stream:
    """A queue of a device. `capture` is what records it instead, if anything does."""

    def __init__(self, device, number):
        self.device, self.number = device, number
        self.queue, self.capture = deque(), None

    def __repr__(self):
        return f"stream {self.number} of cuda:{self.device}"


class Scheduler:
    """Streams by (device, number), and what each still has to do. Any thread may call it.

    `error` is the first error of a kernel, after which the device is lost: every later call raises it.
    """

    def __init__(self, order="random", seed=0):
        assert order in ORDERS, f"order is one of {ORDERS}, got {order}"
        self.order, self._random = order, random.Random(seed)
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self.streams, self.error, self.num_done = {}, None, 0
        self.races, self.block_of = Races(), None  # the start of the block that an address is in, set by the memory
        self.captures = []
        self.around_work = None  # a context for work, set by the operators
        self.num_running = 0
        self.shared = []  # collectives that are not over, in the order of launch
        self._helpers, self._is_helped = [], False  # threads that go on with them, one at a time

    def stream(self, device, number):
        key = device, number
        if key not in self.streams:
            self.streams[key] = Stream(device, number)
        return self.streams[key]

    def check(self):
        if self.error is not None:
            raise CudaError(719, f"unspecified launch failure ({self.error})")

    # ---- what the host asks for; none of it waits

    def enqueue(self, stream, work):
        with self.lock:
            self.check()
            if stream.capture is not None:
                self._capture(stream, work)
                return
            self._append(stream, work)
            self._go_on_by_itself()

    def note(self, stream, name, reads, writes):
        """Note what the host is about to do itself with a device's memory, once it has waited for the stream."""
        with self.lock:
            if stream.capture is None:
                self.races.enqueue(stream, name, reads, writes, self.block_of)

    def reuse(self, stream, extent):
        """Note that a stream may write freed memory from now on: in a capture of it for captured work, else for any."""
        if stream.capture is None:
            self.races.enqueue(stream, REUSE, (), [extent], self.block_of)
        else:
            stream.capture.steps.append(Node(Work(REUSE, None, (), [extent]), stream.capture.last[stream]))

    def enqueue_outside(self, stream, work):
        """Enqueue on a stream's queue even if a capture records the stream: what a host does beside it."""
        with self.lock:
            self._append(stream, work)

    def share(self, stream, collective, group, limit_s):
        """Enqueue a collective of a group, after the group's earlier ones. Returns an event that is passed after it.

        From then on a thread sees that it is done, whether or not the host waits, and ends the process after `limit_s`.
        """
        with self.lock:
            self.check()
            if stream.capture is not None:
                self.fail(stream.capture, "simulated collectives are not captured")
            collective.stream, collective.group, collective.handle = stream, group, None
            collective.event, collective.limit = Event(), time.monotonic() + limit_s
            self.shared.append(collective)
            self._append(stream, collective)
            self.record(collective.event, stream)
            if not self._is_helped and self.shared:
                self._begin_to_help()
            return collective.event

    def _begin_to_help(self):
        atexit.unregister(self._leave)
        atexit.register(self._leave)
        helper = threading.Thread(target=self._help, name="simulated device", daemon=True)
        self._helpers, self._is_helped = [each for each in self._helpers if each.is_alive()] + [helper], True
        helper.start()

    def _leave(self):
        """End the threads that go on with collectives: one that drops a group when the interpreter is gone aborts."""
        with self.lock:
            self.shared.clear()
        for each in self._helpers:
            each.join()

    def abandon(self, group):
        """Forget a group's collectives that are not over."""
        with self.lock:
            for each in [each for each in self.shared if each.group is group]:
                self.shared.remove(each)
                each.stream.queue.remove(each)

    def _help(self):
        while True:
            time.sleep(_PATIENCE_S)
            with self.lock:
                if not self.shared:
                    self._is_helped = False
                    return
                first = self.shared[0]
                if time.monotonic() > first.limit:
                    print(f"NCCL's watchdog: {first.name} has taken too long", file=sys.stderr, flush=True)
                    os.abort()
                while first in self.shared and self._step_towards(first.event):
                    pass

    def _append(self, stream, work):
        self.races.enqueue(stream, work.name, work.reads, work.writes, self.block_of)
        stream.queue.append(work)

    def record(self, event, stream):
        with self.lock:
            self.check()
            if stream.capture is not None:
                if event.external:
                    self.fail(stream.capture, "simulated graphs do not record external events")
                event.captured = stream.capture, stream.capture.last[stream]
                return
            event.asked += 1
            event.captured, event.stream, event.moment = None, stream, self.races.moment(stream)
            stream.queue.append(Record(event, event.asked))
            self._go_on_by_itself()

    def wait(self, stream, event):
        with self.lock:
            self.check()
            if event.captured is not None:
                self._join(stream, event)
            elif event.asked and stream.capture is not None and event.external:
                self._capture(stream, NodeOfWait(event))
            elif event.asked and stream.capture is not None:
                self.fail(stream.capture, "dependency created on uncaptured work in another stream")
            elif event.asked:
                self.races.wait(stream, event.moment)
                if event.done < event.asked:
                    stream.queue.append(Wait(event, event.asked))
                    self._go_on_by_itself()

    def query(self, event):
        """Whether the last record is passed; if not, something is done towards it, so that asking again helps."""
        with self.lock:
            self.check()
            if event.captured is not None:
                self.fail(event.captured[0], "operation not permitted on an event last recorded in a capturing stream")
            self.forbid_in_capture()
            if event.done < event.asked:
                self._step_towards(event)
                return False
            self.races.host_waits(event.moment)
            return True

    # ---- the host waits

    def synchronize_event(self, event):
        with self.lock:
            self.check()
            if event.captured is not None:
                self.fail(event.captured[0], "operation not permitted on an event last recorded in a capturing stream")
            self.forbid_in_capture()
            self.run_until(event)
            self.check()

    def synchronize_stream(self, stream):
        with self.lock:
            if stream.capture is not None:
                self.fail(stream.capture, "operation not permitted when stream is capturing")
            event = Event()
            self.record(event, stream)
            self.run_until(event)
            self.check()

    def query_stream(self, stream):
        """Whether a stream has nothing left to do; if it has, something is done towards it, as for an event."""
        with self.lock:
            self.check()
            if stream.capture is not None:
                self.fail(stream.capture, "operation not permitted when stream is capturing")
            if stream.queue:
                event = Event()
                event.stream = stream
                self._step_towards(event)
                return False
            self.races.host_waits(self.races.moment(stream))
            return True

    def synchronize_device(self, device):
        with self.lock:
            self.check()
            self.forbid_in_capture()
            self.finish(device)
            self.check()

    def finish(self, device):
        """Do everything that a device still has to do."""
        while self.error is None and (busy := [s for s in self.streams.values() if s.device == device and s.queue]):
            event = Event()
            event.asked, event.stream = 1, busy[0]
            busy[0].queue.append(Record(event, 1))
            self.run_until(event)
        for stream in [each for each in self.streams.values() if each.device == device]:
            self.races.host_waits(self.races.moment(stream))

    def forbid_in_capture(self):
        """Refuse what a thread must not do while it captures: capture_error_mode is thread_local or global."""
        for capture in self.captures:
            if capture.failure is None and capture.thread in (None, threading.get_ident()):
                self.fail(capture, "operation not permitted when stream is capturing")

    # ---- captures

    def begin_capture(self, stream, pool, mode):
        with self.lock:
            self.check()
            if stream.number == 0:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            if stream.capture is not None:
                raise capture_error("operation not permitted when stream is capturing")
            thread = None if mode == "global" else threading.get_ident()
            stream.capture = Capture(stream, pool, -1 if mode == "relaxed" else thread)
            self.captures.append(stream.capture)
            return stream.capture

    def end_capture(self, stream):
        """Return the graph of the capture that began on `stream`."""
        with self.lock:
            capture = stream.capture
            if capture is None:
                raise capture_error("operation failed due to a previous error during capture")
            assert capture.origin is stream, "a capture ends on the stream on which it began"
            if capture.failure is None:
                reached, ends = set(), set(capture.last[stream])
                while ends:
                    node = ends.pop()
                    reached.add(node)
                    ends |= node.after - reached
                if any(not last <= reached for last in capture.last.values()):
                    capture.failure = "capturing stream has unjoined work"
            self._leave(capture)
            if capture.failure is not None:
                raise CudaError(901, "operation failed due to a previous error during capture")
            self.races.within_graph(capture.steps, self.block_of)
            return Graph(capture.nodes)

    def _leave(self, capture):
        for each in self.streams.values():
            if each.capture is capture:
                each.capture = None
        self.captures.remove(capture)

    def fail(self, capture, message):
        """Invalidate a capture, which its end then reports, and refuse the call."""
        capture.failure = message
        raise capture_error(message)

    def _capture(self, stream, work):
        capture = stream.capture
        if capture.failure is not None:
            raise CudaError(901, "operation failed due to a previous error during capture")
        node = Node(work, capture.last[stream])
        capture.nodes.append(node)
        capture.steps.append(node)
        capture.last[stream] = frozenset([node])

    def _join(self, stream, event):
        capture, after = event.captured
        if capture not in self.captures:
            return  # over: such an event holds nothing back
        if stream.capture is None:
            stream.capture = capture  # what the stream was to do before is not part of the graph
            capture.last[stream] = frozenset()
        elif stream.capture is not capture:
            self.fail(capture, "wait would merge two captures")
        capture.last[stream] |= after

    def replay(self, graph, stream, prepare):
        """Enqueue a graph, after its replays before; `prepare` is called when its first node is about to run."""
        with self.lock:
            self.check()
            if stream.capture is not None:
                self.fail(stream.capture, "operation not permitted when stream is capturing")
            self.races.wait(stream, graph.moment)
            for events, reads, writes in graph.parts:
                for event in events:
                    self.races.wait(stream, event.moment)
                self.races.enqueue(stream, f"graph of {graph.name}", reads, writes, self.block_of)
            graph.moment = self.races.moment(stream)
            stream.queue.append(Replay(graph, stream, prepare))
            graph.replays.append(stream.queue[-1])
            self._go_on_by_itself()

    # ---- doing it

    def _go_on_by_itself(self):
        if self.num_running:
            return
        if self.order == "earliest":
            while self._step_any():
                pass
        elif self.order == "random":
            while self._random.random() < _EAGERNESS and self._step_any():
                pass

    def run_until(self, event):
        while event.done < event.asked and self.error is None:
            if not self._step_towards(event):
                self._turn.wait(_LOOK_S)  # for other ranks; this one's threads go on meanwhile
        self.races.host_waits(event.moment)

    def _step_towards(self, event):
        """Do something that the event waits for, or anything. Returns whether there was something to do."""
        if self.order != "latest":
            done = self._step_any()
            assert done or self.shared, "every stream waits for another"
            return done
        stream = event.stream
        while not self._step(stream):
            head = stream.queue[0]
            if isinstance(head, Collective):
                if self._is_next(head):
                    return False
                stream = next(each.stream for each in self.shared if each.group is head.group)
            elif isinstance(head, Wait):
                stream = head.event.stream
            elif head.graph.replays[0] is head:  # held back by a wait within
                stream = next(node for node in head.left if self._is_held(head, node)).work.event.stream
            else:
                stream = head.graph.replays[0].stream
        return True

    def _is_next(self, collective):
        return collective is next(each for each in self.shared if each.group is collective.group)

    def _is_over(self, collective):
        """Begin a collective if it is its turn, and look whether it is over. One that has failed never is."""
        if collective.handle is None:
            if not self._is_next(collective):
                return False
            self.num_done += 1
            collective.handle = collective.run()
        if not collective.handle.is_completed():
            return False
        try:
            collective.handle.wait()
        except RuntimeError:  # another rank is gone
            collective.handle = _Never()
            return False
        self.shared.remove(collective)
        return True

    def _step_any(self):
        ready = [each for each in self.streams.values() if each.queue]
        self._random.shuffle(ready)
        return any(self._step(each) for each in ready)

    def _step(self, stream):
        """Do the next thing of a stream, if it may be done."""
        head = stream.queue[0]
        if type(head) is Wait:
            if head.event.done < head.number:
                return False
        elif type(head) is Record:
            head.event.done, head.event.time_s = head.number, time.perf_counter()
        elif type(head) is Replay:
            if head.graph.replays[0] is not head:
                return False
            there_is_more = self._step_of_graph(head)
            if there_is_more is not False:
                return bool(there_is_more)
        elif type(head) is Collective:
            if not self._is_over(head):
                return False
        else:
            self._do(head)
        if stream.queue:  # else an error has emptied it
            stream.queue.popleft()
        return True

    def _step_of_graph(self, replay):
        """Do one node, any whose predecessors are done. Returns whether there are more; None if all are held back."""
        graph = replay.graph
        if replay.left is None:
            replay.left = dict.fromkeys(graph.nodes)
            if replay.prepare is not None:
                replay.prepare()
        if replay.left:
            node = next(iter(replay.left))
            if replay.numbers or (self.order == "random" and len(replay.left) > 1):
                some = [each for each, _ in zip(replay.left, range(32), strict=False)]
                ready = [each for each in some if not any(one in replay.left for one in each.after)]
                ready = [each for each in ready if not self._is_held(replay, each)]
                if not ready:
                    return None
                node = self._random.choice(ready) if self.order == "random" else ready[0]
            del replay.left[node]
            self._do(node.work)
        if replay.left:
            return True
        graph.replays.popleft()
        return False

    @staticmethod
    def _is_held(replay, node):
        return node in replay.numbers and node.work.event.done < replay.numbers[node]

    def _do(self, work):
        self.num_done += 1
        self.num_running += 1
        try:
            with self.around_work() if self.around_work is not None else _no_context():
                work.run()
        except Exception as error:  # a kernel that fails takes the device with it
            self.error = f"{work.name}: {error}"
            self.shared.clear()
            for stream in self.streams.values():
                stream.queue.clear()
        finally:
            self.num_running -= 1


@contextmanager
def _no_context():
    yield
