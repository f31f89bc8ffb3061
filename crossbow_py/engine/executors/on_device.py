"""The common part of executors on CUDA streams: programs that become graphs, and rounds whose results are read late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossbow_py.core.errors import LearnerError, UserError, one_line
from crossbow_py.engine.device.device_tasks import NUM_RESULTS
from crossbow_py.engine.device.graphs import Body, CudaStreams, Event, Graph, Pool, Stream, failed_capture
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors.spans import Mark, StreamSpans
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM
from crossbow_py.engine.trust import GRAPHS, why_not
from crossbow_py.telemetry.timeline import Timeline

# Rounds that a program runs eagerly before it is captured: libraries choose algorithms and allocate workspaces in their
# first calls, which a capture does not allow. They are ordinary rounds, so no state has to be restored.
WARM_UP_ROUNDS = 2
# The graphs of a program that are kept, and the variants whose eager rounds are counted: the last used ones. A rule may
# change its coefficients in every round.
MOST_VARIANTS = 8
# A round's results and events stay until the host has read them, after the next round was issued.
ROUNDS_IN_FLIGHT = 2


class CaptureError(UserError):
    """A CUDA graph cannot hold what a model or loss does.

    Attributes:
        reason: the error of the capture.
        said: what cannot be captured and why, as half a sentence.
    """

    def __init__(self, executor: str, name: str, reason: str) -> None:
        self.reason, self.said = reason, f"{name} cannot be captured ({reason})"
        super().__init__(
            f"executor={executor} cannot capture {name} as a CUDA graph ({reason}), which a model or loss must allow: "
            "no waiting for the device, no shapes that depend on values; set executor=serial."
        )


@dataclass
class Program:
    """The work of a stream in every round: eager at first, then captured and replayed, for each `variant` by itself.

    Variants differ in the launches themselves, as by the round's averaging coefficients. A rule that changes these in
    every round is never captured. None is while there is a `failed_capture`. The last `MOST_VARIANTS` are known.
    """

    device: CudaStreams
    executor: str
    name: str
    stream: Stream
    pool: Pool
    captures: bool = True
    awaiting: Callable[[], AbstractContextManager[None]] = nullcontext
    eager_rounds: dict[Hashable, int] = field(default_factory=dict)
    graphs: dict[Hashable, Graph] = field(default_factory=dict)

    def launch(self, body: Body, variant: Hashable = None) -> None:
        """Run `body` on the stream, or replay what it enqueued when it was captured.

        Blocks the host only to capture. Raises CaptureError if that fails, other than for lack of memory.
        """
        # Backward passes stay on this thread. On autograd's own, libraries would have handles, workspaces and chosen
        # algorithms of their own, and whatever is local to a thread would not be as the capture has it.
        with torch.autograd.set_multithreading_enabled(False):
            self._launch(body, variant)

    def _launch(self, body: Body, variant: Hashable) -> None:
        if not self.runs_graph(variant):
            self.eager_rounds[variant] = self.eager_rounds.pop(variant, 0) + 1
            while len(self.eager_rounds) > MOST_VARIANTS:
                del self.eager_rounds[next(iter(self.eager_rounds))]
            self.device.run(self.name, body, self.stream)
            return
        if variant not in self.graphs:
            self.capture(body, variant)
        self.graphs[variant] = self.graphs.pop(variant)  # the last used one is the last
        self.device.replay(self.graphs[variant], self.stream)

    def capture(self, body: Body, variant: Hashable = None) -> None:
        """Capture `body` for later launches of the variant. Blocks the host. Raises CaptureError, see `launch`."""
        try:
            with self.awaiting(), torch.autograd.set_multithreading_enabled(False):
                self.graphs[variant] = self.device.capture(self.name, body, self.stream, self.pool)
        except Exception as error:
            if is_out_of_memory(error):  # which graphs with pools of their own are likely to cause
                raise
            raise CaptureError(self.executor, self.name, one_line(error)) from error
        while len(self.graphs) > MOST_VARIANTS:  # the capture waited for the device, so none of them is running
            self.device.release(self.graphs.pop(next(iter(self.graphs))))

    def launch_watched(self, body: Body, variant: Hashable = None) -> bool:
        """Launch, and return whether the body drew from global generators, so that it must not be captured."""
        if not self.captures or self.runs_graph(variant):
            self.launch(body, variant)
            return False
        before = self.device.random_state()
        self.launch(body, variant)
        return before != self.device.random_state()

    def runs_graph(self, variant: Hashable = None) -> bool:
        """Return whether the next launch of the variant is a replay, maybe after a capture; else it is eager."""
        if not self.captures:
            return False
        is_warm = self.eager_rounds.get(variant, 0) >= WARM_UP_ROUNDS
        return variant in self.graphs or (is_warm and failed_capture() is None)

    def release(self) -> None:
        """Drop the graphs, which must not be running."""
        for graph in self.graphs.values():
            self.device.release(graph)
        self.graphs.clear()


@dataclass(frozen=True)
class Slot:
    """A round in flight: events at the end of each stream's work and in between, and the round's results.

    Averaging may be in flight for longer. Its event is one for all slots, which graphs can wait for, and is recorded
    again only by a later averaging, which is enqueued after everything that waits for this one.
    """

    events: dict[str, Event]
    results: Tensor


@dataclass
class RoundTimes:
    """The times of a round on one stream, by which it is known for how long it only waited for other ranks.

    Attributes:
        start: when the round's work began.
        host_s: seconds that the host waited for other ranks before it issued the round.
        waits: between each two the stream waited for a sum.
        end: when the round's work was over.
    """

    start: Mark
    host_s: float
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    end: Mark | None = None


class DeviceRounds:
    """Streams by name, the programs on them, and the rounds in flight.

    Between a drain and the next round the bank is the caller's; everything enqueued afterwards waits for the caller's
    work on its current stream.

    Args:
        device, executor: the device, and the executor's name.
        names: the names of the streams; the averaging stream has high priority.
        tasks: of the rounds; a wait for the device is one for its collective, as the device may be in a sum.
        between: the names of events within a round.

    Attributes:
        bank_changed: whether the caller may have changed the bank since the last round.
        no_graphs: why nothing is captured, as half a sentence; None if programs become graphs.
        average_event: recorded after each averaging.
    """

    def __init__(
        self, device: CudaStreams, executor: str, names: Sequence[str], tasks: RoundTasks, between: Sequence[str] = ()
    ) -> None:
        self.device, self._executor, self._awaiting = device, executor, tasks.collective.awaiting
        self.streams = {name: device.new_stream(high_priority=name == AVERAGING_STREAM) for name in names}
        self.bank_changed = True
        self.no_graphs = why_not(GRAPHS, tasks.bank.device) or failed_capture()
        self._programs: list[Program] = []
        self._callers_event = device.new_event()
        self.average_event = device.new_event(for_graphs=True)
        self._slots = [
            Slot(
                {name: device.new_event() for name in (*names, *between)} | {AVERAGING_STREAM: self.average_event},
                device.host_values(tasks.bank.num_learners, NUM_RESULTS),
            )
            for _ in range(ROUNDS_IN_FLIGHT)
        ]
        self._num_issued = 0
        self._pending: dict[int, tuple[dict[str, str], Slot]] = {}
        self._averaged: tuple[int, Event] | None = None  # the round and the event of the last averaging, if it may run
        # With other ranks the first stream is timed: its waits for sums, and how long it had no work.
        self._idle, self._first = tasks.collective.idle, names[0]
        self._times: dict[int, RoundTimes] = {}
        self._begun: RoundTimes | None = None
        self._ended: Mark | None = None  # the end of the last round that was read
        if self._idle is not None:
            self._idle.by_device = True

    def program(self, name: str, stream: str, pool: Pool) -> Program:
        """Return a new program on a stream; programs that share a pool must never run at the same time."""
        captures, own = self.no_graphs is None, self.streams[stream]
        made = Program(self.device, self._executor, name, own, pool, captures, awaiting=self._awaiting)
        self._programs.append(made)
        return made

    @property
    def has_graphs(self) -> bool:
        """Whether anything was captured, and is replayed."""
        return any(program.graphs for program in self._programs)

    def stop_capturing(self, reason: str) -> None:
        """Have all programs run eagerly from now on, because of `reason`, half a sentence."""
        self.no_graphs = reason
        for program in self._programs:
            program.captures = False

    def begin(self) -> Slot:
        """Begin a round, before its first launch. Does not block the host."""
        if self.bank_changed:
            self.device.record(self._callers_event, self.device.callers_stream())
            for stream in self.streams.values():
                self.device.wait(stream, self._callers_event)
        slot = self._slots[self._num_issued % ROUNDS_IN_FLIGHT]
        self._num_issued += 1
        if self._idle is not None:
            host_s = self._idle.take_host_s()
            # Before a drained round the caller has worked, and its waits are not training.
            self._begun = RoundTimes(self._timed_mark(), 0.0 if self.bank_changed else host_s)
        return slot

    def _timed_mark(self) -> Mark:
        return self.device.timed_mark(self.streams[self._first])

    @contextmanager
    def waiting(self, stream: str) -> Iterator[None]:
        """Enqueue waits for sums over ranks, in a block, timed on the first stream. Does not block the host."""
        if self._begun is None or stream != self._first:
            yield
            return
        start = self._timed_mark()
        yield
        self._begun.waits.append((start, self._timed_mark()))

    def mark(self, slot: Slot, stream: str, between: str | None = None) -> Event:
        """Record and return the event of a stream's work in this round, or the event `between` of its work so far."""
        if self._begun is not None and stream == self._first and between is None:
            self._begun.end = self._timed_mark()  # before the event, so that the host can read it after a wait for that
        event = slot.events[between or stream]
        self.device.record(event, self.streams[stream])
        return event

    def end(self, index: int, slot: Slot, last: dict[str, str]) -> None:
        """End a round, after its last launch; `last` has the last task on each stream that was marked."""
        if AVERAGING_STREAM in last:
            self._averaged = index, slot.events[AVERAGING_STREAM]
        if self._begun is not None:
            self._times[index], self._begun = self._begun, None
        self._pending[index] = {name: task for name, task in last.items() if name != AVERAGING_STREAM}, slot
        self.bank_changed = False

    def is_over(self, index: int) -> bool:
        """Return whether `wait` would not block the host. Raises errors of the device."""
        last, slot = self._pending[index]
        return all(self.device.is_over(slot.events[stream]) for stream in last)

    def wait(self, index: int) -> Tensor:
        """Block the host until all streams but the averaging stream have passed the round, and return its results.

        Outcomes do not depend on z, and a sum over ranks may take longer than its round. Raises LearnerError for errors
        of the device.
        """
        last, slot = self._pending.pop(index)
        for stream, task in last.items():
            self._synchronize(slot.events[stream], task, index, stream)
        if self._idle is not None and index in self._times:
            self._idle.add(self._waited_s(self._times.pop(index)))
        return slot.results

    def _waited_s(self, times: RoundTimes) -> float:
        """Return the seconds of waits for other ranks in a round that the first stream has passed.

        If the host came late with the round, because it waited for other ranks, the stream had no work for that time.
        """
        assert times.end is not None, "the event that the host has waited for is after the end"
        waited_ms = sum(start.elapsed_time(end) for start, end in times.waits)
        if self._ended is not None and times.host_s:
            waited_ms += min(times.host_s * 1000, max(0.0, self._ended.elapsed_time(times.start)))
        self._ended = times.end
        return waited_ms / 1000

    def _synchronize(self, event: Event, task: str, index: int, stream: str) -> None:
        try:
            self.device.synchronize_event(event)  # host–device synchronisation
        except Exception as error:
            raise LearnerError(task, index, stream, error) from error

    def wait_for_average(self, stream: str) -> None:
        """Have later work on the stream wait for the last averaging. Does not block the host."""
        if self._averaged is not None:
            self.device.wait(self.streams[stream], self._averaged[1])

    def finish_average(self) -> None:
        """Block the host until the last averaging is over, and so all, which are on one stream.

        Raises LearnerError for errors of the device.
        """
        if self._averaged is not None:
            (index, event), self._averaged = self._averaged, None
            self._synchronize(event, "averaging", index, AVERAGING_STREAM)

    def settle(self) -> None:
        """Block the host until every stream has passed every round; `wait` and `finish_average` raise errors later."""
        events = [slot.events[stream] for last, slot in self._pending.values() for stream in last]
        for event in [*events, *([self._averaged[1]] if self._averaged else [])]:
            with contextlib.suppress(Exception):
                self.device.synchronize_event(event)  # host–device synchronisation

    def spans(self, timeline: Timeline) -> StreamSpans:
        """Return spans for all streams. Blocks the host until the first stream is idle."""
        return StreamSpans(timeline, lambda name: self.device.timed_mark(self.streams[name]), next(iter(self.streams)))

    def close(self, count_steps: Callable[[], None]) -> None:
        """Wait until the device is idle, copy its step counts to the bank, and drop graphs, their pools and streams.

        A round that failed midway has stepped some learners, so the device's counts are the right ones.
        """
        with contextlib.suppress(Exception), self._awaiting():  # errors of the device were raised before
            self.device.synchronize()  # host–device synchronisation
            if not self.bank_changed:
                count_steps()
                self.bank_changed = True
        with contextlib.suppress(Exception):
            for program in self._programs:
                program.release()
        for program in self._programs:
            program.pool = None
        while self.streams:  # closing twice gives none back twice
            name, stream = self.streams.popitem()
            self.device.give_back(stream, high_priority=name == AVERAGING_STREAM)
