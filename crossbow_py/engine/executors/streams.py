"""The CUDA executor `streams`: a stream for each learner, and one for averaging.

    learner j's stream    load(j, n)  learning(j, n)  [wait averaging(n−1)]  correction(j, n)  report(j, n)  record
    averaging stream      [wait for every learner]  averaging(n)  record

With rules that average gradients, every learner's stream also records an event after learning(j, n); the gradient mean,
on the averaging stream, waits for these events, and correction(j, n) waits for it.

One Python thread enqueues everything. Learning, the wait and correction are one CUDA graph, in the learner's own memory
pool, so learners run side by side and share only z, which corrections read and averaging writes. Where something has to
come between, they are a graph each: gradients of all learners, waits for other ranks, the times of a trace. Values that
change from round to round are in tensors on the device (`engine/device/device_tasks.py`), so nothing is captured twice.
Waits are CUDA events, and exactly those that the scheduler names.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import assert_never

from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import CrossbowError, LearnerError
from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.device.device_tasks import LearnerTasks, average_gated, compare_gradients
from crossbow_py.engine.device.graphs import Body, CudaStreams, Event, WaitBetween, failed_capture
from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.executors.on_device import CaptureError, DeviceRounds, Program
from crossbow_py.engine.executors.spans import TaskSpans
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, learner_stream
from crossbow_py.engine.tasks import AveragingTask, ComparisonTask, CorrectionTask, GradientMeanTask, LearningTask, Task
from crossbow_py.engine.trust import GRAPHS
from crossbow_py.telemetry.timeline import Timeline

# Graphs of whole steps that are kept for a learner, each for the averaging of a round; rules with a period have three.
_MOST_STEPS = 3
_DRAWS = (
    "executor={} runs learning tasks without CUDA graphs, which is slower, because the model or the loss draws "
    "random numbers outside nn.Dropout modules."
)
_EAGER = "executor={} runs tasks without CUDA graphs, which is slower, because {}."


class StreamsExecutor(Executor):
    """Runs learners on streams of their own, and averaging on one of high priority.

    Between a drain and the next submit the bank is the caller's; everything the executor enqueues afterwards waits for
    the caller's work on its current stream. What cannot be captured runs eagerly, on the same streams.

    Args:
        tasks: what to compute; its optimizer must be one that `device_update.py` knows.
        device: for tests; by default the bank's device, which must be CUDA.

    Attributes:
        notes: messages for the user about slower operation; complete after the warm-up.

    Raises:
        UserError: the bank is not on CUDA, or the optimizer has no device update.
    """

    NAME = "streams"
    ORDER: Order | None = "rows"  # a learner's row in one or two vectors: the fewest kernels
    DEVICE = "cuda"

    def __init__(self, tasks: RoundTasks, device: CudaStreams | None = None) -> None:
        super().__init__(tasks)
        device = device or CudaStreams(tasks.bank.device)
        learners = range(tasks.bank.num_learners)
        self._bodies = [LearnerTasks(tasks, learner) for learner in learners]
        names = [*map(learner_stream, learners), AVERAGING_STREAM]
        averages_gradients = tasks.gradient_mean is not None
        meets = [GradientMeanTask.NAME, ComparisonTask.NAME, *(f"learning({j})" for j in learners)]
        between = meets if averages_gradients or tasks.compares else []
        self._rounds = DeviceRounds(device, self.NAME, names, tasks, between)
        program, pools = self._rounds.program, [device.new_pool() for _ in learners]
        self._may_be_one = not averages_gradients and tasks.collective.is_alone
        self._steps = [program(f"step({j})", learner_stream(j), pools[j]) for j in learners]
        self._learning = [program(f"learning({j})", learner_stream(j), pools[j]) for j in learners]
        self._correction = [program(f"correction({j})", learner_stream(j), pools[j]) for j in learners]
        self._averaging = program("averaging", AVERAGING_STREAM, device.new_pool())
        self._gradient_mean = program("gradient mean", AVERAGING_STREAM, device.new_pool())
        self._comparison = program("comparison", AVERAGING_STREAM, device.new_pool())
        if not tasks.collective.is_alone:  # sums by NCCL are not captured
            self._averaging.captures = self._gradient_mean.captures = False
        if self._rounds.no_graphs:
            self.notes.append(_EAGER.format(self.NAME, self._rounds.no_graphs))
        self._marks: dict[Task, Event] = {}

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        return self._rounds.spans(timeline)

    def in_effect(self) -> list[str]:
        return [GRAPHS] * self._rounds.has_graphs + ["batches"] * self._bodies[0].gathers_by_kernel

    def drain(self) -> list[RoundOutcome]:
        outcomes = super().drain()
        self._rounds.bank_changed = True
        return outcomes

    def _start(self, outcome: RoundOutcome) -> None:
        """Enqueue a round: each launch on its stream, after the events of `launch.after`.

        An event is recorded after the last task of every stream, which covers the tasks before it. The host waits only
        if a graph is captured or if the feed makes it.
        """
        rounds, launches = self._rounds, self._launches(outcome.plan)
        slot = rounds.begin()
        as_one = self._runs_as_one(outcome.plan)
        last = {launch.stream: launch for launch in launches}
        for launch in launches:
            try:
                if not (as_one and isinstance(launch.task, CorrectionTask)):  # run with learning
                    self._launch(launch, outcome, slot.results, as_one)
                if last[launch.stream] is launch:
                    self._marks[launch.task] = rounds.mark(slot, launch.stream)
                elif str(launch.task) in slot.events and not as_one:
                    self._marks[launch.task] = rounds.mark(slot, launch.stream, between=str(launch.task))
            except CrossbowError:
                raise
            except Exception as error:
                raise LearnerError(str(launch.task), outcome.plan.index, launch.stream, error) from error
        rounds.end(outcome.plan.index, slot, {stream: str(launch.task) for stream, launch in last.items()})

    def _runs_as_one(self, plan: Round) -> bool:
        """Return whether learning and correction of each learner are one graph, which is captured if both are warm."""
        steps, averaging = self._steps, plan.averaging
        if not self._may_be_one or plan.compares or self._spans is not None or not steps[0].captures:
            return False
        if averaging in steps[-1].graphs:
            return True
        learning, correction = self._learning[0], self._correction[0]  # those of others have run as often
        is_warm = learning.runs_graph() and correction.runs_graph(averaging) and failed_capture() is None
        return is_warm and len(steps[0].graphs) < _MOST_STEPS and self._capture_steps(plan)

    def _capture_steps(self, plan: Round) -> bool:
        """Capture the steps of all learners before any runs, so that none has stepped if memory does not hold them.

        Returns False if one cannot be captured.
        """
        for learner, program in enumerate(self._steps):
            try:
                self._load(learner, plan, masks_ahead=True)
                program.capture(self._step(learner, plan.averaging), plan.averaging)
            except CaptureError as error:
                self._stop_capturing(error)
                return False
            except CrossbowError:
                raise
            except Exception as error:
                raise LearnerError(f"learning({learner})", plan.index, learner_stream(learner), error) from error
        return True

    def _step(self, learner: int, averaging: LinearRound | None) -> Body:
        bodies, rounds, stream = self._bodies[learner], self._rounds, learner_stream(learner)
        learn = partial(bodies.learn, shared=False, masks_ahead=True)
        event = None if averaging is None else rounds.average_event
        return WaitBetween(rounds.device, rounds.streams[stream], learn, event, partial(bodies.correct, averaging))

    def _launch(self, launch: Launch, outcome: RoundOutcome, host: Tensor, as_one: bool) -> None:
        stream, task = self._rounds.streams[launch.stream], launch.task
        with self._rounds.waiting(launch.stream) if launch.after else nullcontext():
            for other in launch.after:
                if isinstance(other, AveragingTask):
                    self._rounds.wait_for_average(launch.stream)
                elif other in self._marks:  # else the host has waited for it
                    self._rounds.device.wait(stream, self._marks[other])
        with self.span(task.NAME, launch.stream, task.round_index):
            match task:
                case LearningTask():
                    if as_one:
                        self._load(task.learner, outcome.plan, masks_ahead=True)
                        averaging = outcome.plan.averaging
                        self._steps[task.learner].launch(self._step(task.learner, averaging), averaging)
                        self._report(task.learner, host)
                    else:
                        self._learn(task.learner, outcome.plan)
                case CorrectionTask():
                    bodies, averaging = self._bodies[task.learner], outcome.plan.averaging
                    self._launch_program(self._correction[task.learner], partial(bodies.correct, averaging), averaging)
                    self._report(task.learner, host)
                case AveragingTask():
                    self._launch_program(self._averaging, partial(self.tasks.average, outcome), outcome.plan.averaging)
                case GradientMeanTask():
                    self._launch_program(self._gradient_mean, partial(average_gated, self._bodies))
                case ComparisonTask():
                    self._launch_program(self._comparison, partial(compare_gradients, self._bodies))
                case _:
                    assert_never(task)

    def _launch_program(self, program: Program, body: Body, variant: Hashable = None) -> None:
        """Launch a program; if it cannot be captured, everything runs eagerly from this task on."""
        try:
            program.launch(body, variant)
        except CaptureError as error:
            self._stop_capturing(error)
            program.launch(body, variant)

    def _stop_capturing(self, error: CaptureError) -> None:
        self._rounds.stop_capturing(error.said)
        self.notes.append(_EAGER.format(self.NAME, error.said))

    def _load(self, learner: int, plan: Round, masks_ahead: bool) -> None:
        load = partial(self._bodies[learner].load, plan, self._rounds.bank_changed, masks_ahead)
        self._rounds.device.run(f"load({learner})", load, self._rounds.streams[learner_stream(learner)])

    def _report(self, learner: int, host: Tensor) -> None:
        report = partial(self._bodies[learner].report, host)
        self._rounds.device.run(f"report({learner})", report, self._rounds.streams[learner_stream(learner)])

    def _learn(self, learner: int, plan: Round) -> None:
        """Load the round and learn, on the learner's stream."""
        bodies = self._bodies[learner]
        try:
            drawn = self._load_and_learn(learner, plan)
        except CaptureError as error:
            self._stop_capturing(error)
            drawn = self._load_and_learn(learner, plan)  # masks are drawn anew, as the pass takes them
        self.notes += bodies.notes
        bodies.notes.clear()
        if drawn:
            self.notes.append(_DRAWS.format(self.NAME))
            for each in (*self._learning, *self._steps):
                each.captures = False

    def _load_and_learn(self, learner: int, plan: Round) -> bool:
        """Return whether learning drew from global generators, so that it must not be captured."""
        program = self._learning[learner]
        masks_ahead = program.runs_graph()
        self._load(learner, plan, masks_ahead)
        return program.launch_watched(partial(self._bodies[learner].learn, shared=False, masks_ahead=masks_ahead))

    def _wait(self, outcome: RoundOutcome) -> None:
        index = outcome.plan.index
        results = self._rounds.wait(index)
        # The host has waited for these tasks: no stream needs to, and their events may be recorded again.
        self._marks = {task: event for task, event in self._marks.items() if task.round_index > index}
        for bodies in self._bodies:
            bodies.read(outcome, results)

    def _is_over(self, outcome: RoundOutcome) -> bool:
        return self._rounds.is_over(outcome.plan.index)

    def _wait_for_z(self) -> None:
        self._rounds.finish_average()

    def _settle(self) -> None:
        self._rounds.settle()

    def _count_steps(self) -> None:
        for bodies in self._bodies:
            bodies.count_steps()

    def close(self) -> None:
        self._rounds.close(self._count_steps)
