"""The order of tasks, written by hand."""

from __future__ import annotations

from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, Scheduler
from crossbow_py.engine.tasks import AveragingTask, CorrectionTask, LearningTask


def test_scheduler_two_learners_two_rounds_issues_the_hand_written_list():
    scheduler = Scheduler(2)
    first, second = scheduler.round(0, averages=True), scheduler.round(1, averages=True)
    assert first == (
        Launch(LearningTask(0, 0), "learner 0"),
        Launch(LearningTask(1, 0), "learner 1"),
        Launch(CorrectionTask(0, 0), "learner 0"),
        Launch(CorrectionTask(1, 0), "learner 1"),
        Launch(AveragingTask(0), AVERAGING_STREAM, (CorrectionTask(0, 0), CorrectionTask(1, 0))),
    )
    assert second == (
        Launch(LearningTask(0, 1), "learner 0"),
        Launch(LearningTask(1, 1), "learner 1"),
        Launch(CorrectionTask(0, 1), "learner 0", (AveragingTask(0),)),
        Launch(CorrectionTask(1, 1), "learner 1", (AveragingTask(0),)),
        Launch(AveragingTask(1), AVERAGING_STREAM, (CorrectionTask(0, 1), CorrectionTask(1, 1))),
    )


def test_scheduler_round_that_does_not_average_leaves_the_last_average_until_the_next_that_does():
    scheduler = Scheduler(1)
    scheduler.round(0, averages=True)
    launches = scheduler.round(1, averages=False)
    assert [launch.task for launch in launches] == [LearningTask(0, 1), CorrectionTask(0, 1)]
    assert launches[1].after == ()
    assert scheduler.round(2, averages=True)[1].after == (AveragingTask(0),)


def test_scheduler_after_synchronize_waits_for_nothing_before():
    scheduler = Scheduler(1)
    scheduler.round(0, averages=True)
    scheduler.synchronize()
    assert scheduler.round(1, averages=True)[1].after == ()
