"""Which task next, on which stream, after what. Pure: values in, launches out; no maths, no threads, no CUDA.

A stream runs its tasks in the order they are issued, so only dependencies between streams are named. Executors turn a
launch into a call (serial), a queue entry and events (threads), or a graph replay and event waits (CUDA streams).
"""

from __future__ import annotations

from dataclasses import dataclass

from crossbow_py.engine.tasks import AveragingTask, CorrectionTask, GradientMeanTask, LearningTask, Task

AVERAGING_STREAM = "averaging"


def learner_stream(learner: int) -> str:
    """The name of a learner's stream."""
    return f"learner {learner}"


@dataclass(frozen=True)
class Launch:
    """A task, the stream it is issued on, and the tasks of other streams that must be over before it starts."""

    task: Task
    stream: str
    after: tuple[Task, ...] = ()


class Scheduler:
    """Issues rounds. Its only state is the last averaging task, which the next corrections that pull wait for.

    Learning of round n+1 depends on nothing but its own stream, so it overlaps averaging of round n; with a period τ so
    do all rounds up to the corrections of the next one that averages. Where gradients are averaged, learners wait for
    each other between learning and correction.
    """

    def __init__(self, num_learners: int, averages_gradients: bool = False) -> None:
        self.num_learners, self._averages_gradients = num_learners, averages_gradients
        self._last_averaging: AveragingTask | None = None

    def round(self, round_index: int, averages: bool) -> tuple[Launch, ...]:
        """The launches of one round, in issue order. `averages` says whether z moves in this round."""
        learners = range(self.num_learners)
        launches = [Launch(LearningTask(j, round_index), learner_stream(j)) for j in learners]
        # In other rounds corrections neither read z nor write C, so that z has until the next averaging to come.
        after: tuple[Task, ...] = (self._last_averaging,) if self._last_averaging and averages else ()
        if self._averages_gradients:
            mean = GradientMeanTask(round_index)
            launches.append(Launch(mean, AVERAGING_STREAM, tuple(launch.task for launch in launches)))
            after = mean, *after
        corrections = [CorrectionTask(j, round_index) for j in learners]
        launches += [Launch(task, learner_stream(task.learner), after) for task in corrections]
        if averages:
            self._last_averaging = AveragingTask(round_index)
            launches.append(Launch(self._last_averaging, AVERAGING_STREAM, tuple(corrections)))
        return tuple(launches)

    def synchronize(self) -> None:
        """Everything issued is over: the next round waits for nothing before it."""
        self._last_averaging = None
