"""The scheduler says which tasks a round has, on which streams, and after which other tasks.

It is pure: values in, launches out; no maths, no threads, no CUDA. A stream runs its tasks in the order they are
issued, so only dependencies between streams are named. Executors turn a launch into a call (serial), a queue entry and
events (threads), or a graph replay and event waits (CUDA streams).
"""

from __future__ import annotations

from dataclasses import dataclass

from crossbow_py.engine.tasks import AveragingTask, ComparisonTask, CorrectionTask, GradientMeanTask, LearningTask, Task

AVERAGING_STREAM = "averaging"


def learner_stream(learner: int) -> str:
    """Return the name of a learner's stream."""
    return f"learner {learner}"


@dataclass(frozen=True)
class Launch:
    """A task, its stream, and the tasks on other streams that must be over before it starts."""

    task: Task
    stream: str
    after: tuple[Task, ...] = ()


class Scheduler:
    """Issues rounds. Its only state is the last averaging task, for which the next corrections that pull wait.

    Learning of round n+1 depends only on its own stream, so it overlaps averaging of round n; with a period τ, so do
    all rounds up to the corrections of the next one that averages. If gradients are averaged or compared, learners wait
    for each other between learning and correction.

    Args:
        num_learners: the number of learner streams, K or the number of groups of learners that run as one.
        averages_gradients: whether every round has a gradient mean.
    """

    def __init__(self, num_learners: int, averages_gradients: bool = False) -> None:
        self.num_learners, self._averages_gradients = num_learners, averages_gradients
        self._last_averaging: AveragingTask | None = None

    def round(
        self, round_index: int, averages: bool, compares: bool = False, pulls: bool | None = None
    ) -> tuple[Launch, ...]:
        """Return the launches of one round, in issue order.

        z moves in this round if it `averages`, and is read by corrections if it `pulls`, by default if z moves. The
        learners' gradients are compared if it `compares`.
        """
        learners = range(self.num_learners)
        launches = [Launch(LearningTask(j, round_index), learner_stream(j)) for j in learners]
        # In other rounds corrections neither read z nor write C, so averaging may still run.
        pulls = averages if pulls is None else pulls
        after: tuple[Task, ...] = (self._last_averaging,) if self._last_averaging and pulls else ()
        learned = tuple(launch.task for launch in launches)
        if compares:
            comparison = ComparisonTask(round_index)
            launches.append(Launch(comparison, AVERAGING_STREAM, learned))
            after = comparison, *after
        if self._averages_gradients:
            mean = GradientMeanTask(round_index)
            launches.append(Launch(mean, AVERAGING_STREAM, learned))
            after = mean, *after
        corrections = [CorrectionTask(j, round_index) for j in learners]
        launches += [Launch(task, learner_stream(task.learner), after) for task in corrections]
        if averages:
            self._last_averaging = AveragingTask(round_index)
            launches.append(Launch(self._last_averaging, AVERAGING_STREAM, tuple(corrections)))
        return tuple(launches)

    def synchronize(self) -> None:
        """Note that everything issued is over, so that the next round waits for no earlier one."""
        self._last_averaging = None
