"""CUDA executor: a stream a learner, its tasks captured as CUDA graphs and replayed by one Python thread.

    learner j's stream    load(j, n)  learning(j, n)  [wait averaging(n−1)]  correction(j, n)  report(j, n)  record
    averaging stream      [wait for every learner]  averaging(n)  record

Learning and correction are one graph each, in the learner's own memory pool, so learners run side by side and share
nothing but z, which corrections read and averaging writes. What changes from round to round is in tensors on the device
(`engine/device_tasks.py`), so nothing is captured twice. Waits are CUDA events, and exactly those the scheduler names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

from crossbow_py.engine.device_tasks import NUM_RESULTS, DeviceTasks
from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.executors.device_streams import Body, CudaStreams, DeviceStreams, Event, Graph, Pool, Stream
from crossbow_py.engine.memory import is_out_of_memory
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, learner_stream
from crossbow_py.engine.tasks import AveragingTask, CorrectionTask, LearningTask, Task
from crossbow_py.errors import CrossbowError, LearnerError, UserError
from crossbow_py.targets import one_line

# Rounds a task runs eagerly before it is captured: libraries choose algorithms and allocate workspaces at their first
# calls, which a capture does not allow. They are ordinary rounds, so there is no state to put back afterwards.
WARM_UP_ROUNDS = 2
# A round's results and events stay until the host has read them, and that is after the next round was issued.
ROUNDS_IN_FLIGHT = 2

_DRAWS = (
    "executor=streams runs learning tasks without CUDA graphs, which is slower, because the model or the loss draws "
    "random numbers outside nn.Dropout modules."
)


@dataclass
class _Program:
    """One task's work, round after round: eager at first, then captured and replayed; once for every `variant`.

    A variant is what differs in the launches themselves, which are the round's averaging coefficients. A rule that
    changes them every round is never captured.
    """

    device: DeviceStreams
    name: str
    stream: Stream
    pool: Pool
    captures: bool
    eager_rounds: dict[Hashable, int] = field(default_factory=dict)
    graphs: dict[Hashable, Graph] = field(default_factory=dict)

    def launch(self, body: Body, variant: Hashable = None) -> None:
        """Run `body` on the stream, or replay what it enqueued when it was captured.

        Blocks the host only when it captures. Raises UserError when that fails, other than for want of memory.
        """
        if not self.runs_graph(variant):
            self.eager_rounds[variant] = self.eager_rounds.get(variant, 0) + 1
            self.device.run(self.name, body, self.stream)
            return
        if variant not in self.graphs:
            self.graphs[variant] = self._capture(body)
        self.device.replay(self.graphs[variant], self.stream)

    def runs_graph(self, variant: Hashable = None) -> bool:
        """Whether the next launch of the variant is a replay, after a capture if need be; else it is eager."""
        return self.captures and self.eager_rounds.get(variant, 0) >= WARM_UP_ROUNDS

    def _capture(self, body: Body) -> Graph:
        try:
            return self.device.capture(self.name, body, self.stream, self.pool)
        except Exception as error:
            if is_out_of_memory(error):  # likelier here than anywhere, with pools of their own
                raise
            raise UserError(
                f"executor=streams cannot capture {self.name} as a CUDA graph ({one_line(error)}), which a model or "
                "loss must allow: no waiting for the device, no shapes that follow from values; set executor=serial."
            ) from error

    def release(self) -> None:
        """Forget the graphs, which must not be running."""
        for graph in self.graphs.values():
            self.device.release(graph)
        self.graphs.clear()


class StreamsExecutor(Executor):
    """Learners on streams of their own, averaging on one of high priority. Experimental: no GPU has run it yet.

    Between a drain and the next submit the bank is the caller's; the caller's work on its current stream then comes
    before everything the executor enqueues.

    Args:
        tasks: what to compute; its optimizer must be SGD or AdamW.
        device: for tests; by default CUDA, on the bank's device.

    Attributes:
        EXPERIMENTAL: until its tests have passed on a GPU.
        notes: sentences for the user about what runs slower than it might; complete after the warm-up.

    Raises:
        UserError: the bank is not on CUDA, or the optimizer has no device update.
    """

    NAME = "streams"
    ORDER = "rows"  # a learner's row in one or two vectors: the fewest kernels
    EXPERIMENTAL = True
    DEVICE = "cuda"

    def __init__(self, tasks: RoundTasks, device: DeviceStreams | None = None) -> None:
        super().__init__(tasks)
        self._device = device or CudaStreams(tasks.bank.device)
        self._bodies = DeviceTasks(tasks)
        learners = range(tasks.bank.num_learners)
        self._streams = {learner_stream(j): self._device.new_stream() for j in learners}
        self._streams[AVERAGING_STREAM] = self._device.new_stream(high_priority=True)
        pools = [self._device.new_pool() for _ in learners]
        self._learning = [self._program(f"learning({j})", learner_stream(j), pools[j]) for j in learners]
        self._correction = [self._program(f"correction({j})", learner_stream(j), pools[j]) for j in learners]
        self._averaging = self._program("averaging", AVERAGING_STREAM, self._device.new_pool())
        # NCCL stays out of graphs.
        self._averaging.captures = tasks.collective.num_devices == 1
        self._callers_event = self._device.new_event()
        self._slots = [
            (
                {name: self._device.new_event() for name in self._streams},
                self._device.host_values(len(learners), NUM_RESULTS),
            )
            for _ in range(ROUNDS_IN_FLIGHT)
        ]
        self._num_issued = 0
        self._after_drain = True
        self._marks: dict[Task, Event] = {}
        self._pending: dict[int, tuple[list[Launch], int]] = {}

    def _program(self, name: str, stream: str, pool: Pool) -> _Program:
        return _Program(self._device, name, self._streams[stream], pool, captures=True)

    def _learn_eagerly(self, note: str) -> None:
        for program in self._learning:
            program.captures = False
        self.notes.append(note)

    def drain(self) -> list[RoundOutcome]:
        """See Executor; the next round waits for what the caller enqueued meanwhile."""
        outcomes = super().drain()
        self._after_drain = True
        return outcomes

    def _issue(self, launches: tuple[Launch, ...], outcome: RoundOutcome) -> None:
        """Enqueue a round: each launch on its stream, after the events of `launch.after`.

        The last task of every stream is followed by a record; that covers the tasks before it. The host does not
        wait, except where a graph is captured and where the feed makes it.
        """
        slot = self._num_issued % ROUNDS_IN_FLIGHT
        self._num_issued += 1
        if self._after_drain:
            self._follow_caller()
        last = {launch.stream: launch for launch in launches}
        for launch in launches:
            try:
                self._launch(launch, outcome, slot)
                if last[launch.stream] is launch:
                    self._mark(launch, slot)
            except CrossbowError:
                raise
            except Exception as error:
                raise LearnerError(str(launch.task), outcome.plan.index, launch.stream, error) from error
        self._pending[outcome.plan.index] = (list(last.values()), slot)
        self._after_drain = False

    def _follow_caller(self) -> None:
        """Every stream goes on after what the caller's current stream holds by now."""
        self._device.record(self._callers_event, self._device.callers_stream())
        for stream in self._streams.values():
            self._device.wait(stream, self._callers_event)

    def _launch(self, launch: Launch, outcome: RoundOutcome, slot: int) -> None:
        stream, task = self._streams[launch.stream], launch.task
        for other in launch.after:
            if other in self._marks:  # else the host itself has waited for it
                self._device.wait(stream, self._marks[other])
        if isinstance(task, LearningTask):
            self._learn(task.learner, outcome, stream)
        elif isinstance(task, CorrectionTask):
            self._correct(task.learner, outcome, stream, slot)
        elif isinstance(task, AveragingTask):
            self._averaging.launch(partial(self._bodies.average, outcome), outcome.plan.averaging)

    def _learn(self, learner: int, outcome: RoundOutcome, stream: Stream) -> None:
        """On the learner's stream: load the round, then learn."""
        program, bodies = self._learning[learner], self._bodies
        ahead = program.runs_graph()
        load = partial(bodies.load, learner, outcome.plan, bank_changed=self._after_drain, masks_ahead=ahead)
        self._device.run(f"load({learner})", load, stream)
        watched = program.captures and not ahead
        before = self._device.random_state() if watched else None
        program.launch(partial(bodies.learn, learner, masks_ahead=ahead))
        if watched and before != self._device.random_state():
            self._learn_eagerly(_DRAWS)

    def _correct(self, learner: int, outcome: RoundOutcome, stream: Stream, slot: int) -> None:
        """On the learner's stream: correct, then send the results to the host."""
        bodies, averaging, (_, host) = self._bodies, outcome.plan.averaging, self._slots[slot]
        self._correction[learner].launch(partial(bodies.correct, learner, averaging), averaging)
        self._device.run(f"report({learner})", partial(bodies.report, learner, host), stream)

    def _mark(self, launch: Launch, slot: int) -> None:
        events, _ = self._slots[slot]
        self._device.record(events[launch.stream], self._streams[launch.stream])
        self._marks[launch.task] = events[launch.stream]

    def _wait(self, outcome: RoundOutcome) -> None:
        """Block the host until every stream is past the round, then read its results."""
        index = outcome.plan.index
        last, slot = self._pending.pop(index)
        events, host = self._slots[slot]
        for launch in last:
            try:
                self._device.synchronize_event(events[launch.stream])  # host–device synchronisation
            except Exception as error:
                raise LearnerError(str(launch.task), index, launch.stream, error) from error
        # The host has waited for these: no stream needs to, and their events may be recorded anew.
        self._marks = {task: event for task, event in self._marks.items() if task.round_index > index}
        self._bodies.read(outcome, host)

    def close(self) -> None:
        """Wait until the device is idle, count the steps nobody waited for, drop the graphs, and only then their pools.

        A round that died on the way has left its steps in some rows, so the device's own counts are the ones kept.
        """
        with contextlib.suppress(Exception):  # a device that failed has said so before
            self._device.synchronize()  # host–device synchronisation
            if not self._after_drain:
                self._bodies.count_steps()
                self._after_drain = True
        programs = [*self._learning, *self._correction, self._averaging]
        with contextlib.suppress(Exception):
            for program in programs:
                program.release()
        for program in programs:
            program.pool = None
