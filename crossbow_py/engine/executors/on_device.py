"""What executors over CUDA streams share: programs that become graphs, and rounds whose results the host reads late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from crossbow_py.core.errors import LearnerError, UserError, one_line
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.device.streams import Body, DeviceStreams, Event, Graph, Pool, Stream
from crossbow_py.engine.executors.spans import SpansOfStreams
from crossbow_py.engine.scheduler import AVERAGING_STREAM
from crossbow_py.telemetry.timeline import Timeline

# Rounds a program runs eagerly before it is captured: libraries choose algorithms and allocate workspaces at their
# first calls, which a capture does not allow. They are ordinary rounds, so there is no state to put back afterwards.
WARM_UP_ROUNDS = 2
# A round's results and events stay until the host has read them, and that is after the next round was issued.
ROUNDS_IN_FLIGHT = 2

Awaiting = Callable[[], AbstractContextManager[None]]


class CaptureError(UserError):
    """What a model or loss does is nothing a CUDA graph can hold. `reason` is what the capture said."""

    def __init__(self, executor: str, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"executor={executor} cannot capture {name} as a CUDA graph ({reason}), which a model or loss must allow: "
            "no waiting for the device, no shapes that follow from values; set executor=serial."
        )


@dataclass
class Program:
    """A stream's work, round after round: eager at first, then captured and replayed; once for every `variant`.

    A variant is what differs in the launches themselves, as the round's averaging coefficients do. A rule that changes
    them every round is never captured.
    """

    device: DeviceStreams
    executor: str
    name: str
    stream: Stream
    pool: Pool
    captures: bool = True
    awaiting: Awaiting = nullcontext
    eager_rounds: dict[Hashable, int] = field(default_factory=dict)
    graphs: dict[Hashable, Graph] = field(default_factory=dict)

    def launch(self, body: Body, variant: Hashable = None) -> None:
        """Run `body` on the stream, or replay what it enqueued when it was captured.

        Blocks the host only when it captures. Raises CaptureError when that fails, other than for want of memory.
        """
        if not self.runs_graph(variant):
            self.eager_rounds[variant] = self.eager_rounds.get(variant, 0) + 1
            self.device.run(self.name, body, self.stream)
            return
        if variant not in self.graphs:
            self.graphs[variant] = self._capture(body)
        self.device.replay(self.graphs[variant], self.stream)

    def launch_watched(self, body: Body, variant: Hashable = None) -> bool:
        """As `launch`. Whether the body drew random numbers unasked, so that it must not be captured."""
        if not self.captures or self.runs_graph(variant):
            self.launch(body, variant)
            return False
        before = self.device.random_state()
        self.launch(body, variant)
        return before != self.device.random_state()

    def runs_graph(self, variant: Hashable = None) -> bool:
        """Whether the next launch of the variant is a replay, after a capture if need be; else it is eager."""
        return self.captures and self.eager_rounds.get(variant, 0) >= WARM_UP_ROUNDS

    def _capture(self, body: Body) -> Graph:
        try:
            with self.awaiting():
                return self.device.capture(self.name, body, self.stream, self.pool)
        except Exception as error:
            if is_out_of_memory(error):  # likelier here than anywhere, with pools of their own
                raise
            raise CaptureError(self.executor, self.name, one_line(error)) from error

    def release(self) -> None:
        """Forget the graphs, which must not be running."""
        for graph in self.graphs.values():
            self.device.release(graph)
        self.graphs.clear()


@dataclass(frozen=True)
class Slot:
    """A round in flight: the event at the end of each stream that had work, those in between, and its results.

    Averaging may be in flight for longer. Its event is recorded anew only by a later averaging, which comes after all
    that waits for this one was enqueued.
    """

    events: dict[str, Event]
    results: Tensor


class DeviceRounds:
    """Streams by name, the programs on them, and the rounds in flight.

    Between a drain and the next round the bank is the caller's; the caller's work on its current stream then comes
    before everything that is enqueued.

    Args:
        device: what runs it all.
        executor: its name.
        names: of the streams; the averaging stream has high priority.
        results: shape of a round's results, float64.
        awaiting: around what blocks the host until the device is through, which may be in a sum with other ranks.
        between: names of events within a round.

    Attributes:
        streams: by name.
        bank_changed: whether others may have changed the bank since the last round.
    """

    def __init__(
        self,
        device: DeviceStreams,
        executor: str,
        names: Sequence[str],
        results: tuple[int, int],
        awaiting: Awaiting = nullcontext,
        between: Sequence[str] = (),
    ) -> None:
        self.device, self._executor, self._awaiting = device, executor, awaiting
        self.streams = {name: device.new_stream(high_priority=name == AVERAGING_STREAM) for name in names}
        self.bank_changed = True
        self._programs: list[Program] = []
        self._callers_event = device.new_event()
        self._slots = [
            Slot({name: device.new_event() for name in (*names, *between)}, device.host_values(*results))
            for _ in range(ROUNDS_IN_FLIGHT)
        ]
        self._num_issued = 0
        self._pending: dict[int, tuple[dict[str, str], Slot]] = {}
        self._averaged: tuple[int, Event] | None = None  # the last averaging that may still run: its round and its end

    def program(self, name: str, stream: str, pool: Pool) -> Program:
        """A program on a stream; programs that share a pool never run at the same time."""
        made = Program(self.device, self._executor, name, self.streams[stream], pool, awaiting=self._awaiting)
        self._programs.append(made)
        return self._programs[-1]

    def begin(self) -> Slot:
        """Before a round's first launch. Does not block the host."""
        if self.bank_changed:
            self.device.record(self._callers_event, self.device.callers_stream())
            for stream in self.streams.values():
                self.device.wait(stream, self._callers_event)
        slot = self._slots[self._num_issued % ROUNDS_IN_FLIGHT]
        self._num_issued += 1
        return slot

    def mark(self, slot: Slot, stream: str, between: str | None = None) -> Event:
        """The end of a stream's work in this round, or of its work so far: an event recorded on it."""
        event = slot.events[between or stream]
        self.device.record(event, self.streams[stream])
        return event

    def end(self, index: int, slot: Slot, last: dict[str, str]) -> None:
        """After a round's last launch; `last` is the name of the last task on each stream that was marked."""
        if AVERAGING_STREAM in last:
            self._averaged = index, slot.events[AVERAGING_STREAM]
        self._pending[index] = {name: task for name, task in last.items() if name != AVERAGING_STREAM}, slot
        self.bank_changed = False

    def is_over(self, index: int) -> bool:
        """Whether `wait` would not block the host. Raises what only the device saw."""
        last, slot = self._pending[index]
        return all(self.device.is_over(slot.events[stream]) for stream in last)

    def wait(self, index: int) -> Tensor:
        """Block the host until every stream but the averaging stream is past the round. Returns its results.

        Outcomes do not hang on z: a sum over ranks may take longer than its round. Raises LearnerError for what only
        the device saw.
        """
        last, slot = self._pending.pop(index)
        for stream, task in last.items():
            self._synchronize(slot.events[stream], task, index, stream)
        return slot.results

    def _synchronize(self, event: Event, task: str, index: int, stream: str) -> None:
        try:
            self.device.synchronize_event(event)  # host–device synchronisation
        except Exception as error:
            raise LearnerError(task, index, stream, error) from error

    def wait_for_average(self, stream: str) -> None:
        """Work on the stream from now on starts after the last averaging. Does not block the host."""
        if self._averaged is not None:
            self.device.wait(self.streams[stream], self._averaged[1])

    def finish_average(self) -> None:
        """Block the host until the last averaging is over, which is enough for all: they are on one stream.

        Raises LearnerError for what only the device saw.
        """
        if self._averaged is not None:
            (index, event), self._averaged = self._averaged, None
            self._synchronize(event, "averaging", index, AVERAGING_STREAM)

    def settle(self) -> None:
        """Block the host until every stream is past every round; `wait` and `finish_average` raise what failed."""
        events = [slot.events[stream] for last, slot in self._pending.values() for stream in last]
        for event in [*events, *([self._averaged[1]] if self._averaged else [])]:
            with contextlib.suppress(Exception):
                self.device.synchronize_event(event)  # host–device synchronisation

    def spans(self, timeline: Timeline) -> SpansOfStreams:
        """Spans on all streams. Blocks the host until the first of them is idle."""
        marks = {name: partial(self.device.timed_mark, stream) for name, stream in self.streams.items()}
        return SpansOfStreams(timeline, marks)

    def close(self, count_steps: Callable[[], None]) -> None:
        """Wait until the device is idle, count the steps nobody waited for, drop the graphs, and only then their pools.

        A round that died on the way has left its steps in some rows, so the device's own counts are the ones kept.
        """
        with contextlib.suppress(Exception), self._awaiting():  # a device that failed has said so before
            self.device.synchronize()  # host–device synchronisation
            if not self.bank_changed:
                count_steps()
                self.bank_changed = True
        with contextlib.suppress(Exception):
            for program in self._programs:
                program.release()
        for program in self._programs:
            program.pool = None
