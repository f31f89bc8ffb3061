"""The CPU executor `fused_threads`, between `threads` and `fused`: groups of fused learners, each on a thread.

Fusing gives operators more work than one small batch does. With one intra-op thread for each group, cores need not wait
for each other after every operator, which costs most when other programs run too. Tasks, order and overlap are those of
`threads.py` with a group in place of a learner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from crossbow_py.engine.executors.base import even_groups
from crossbow_py.engine.executors.fused import learn_fused
from crossbow_py.engine.executors.threads import ThreadsExecutor
from crossbow_py.engine.fusion.fused_agreement import outdated, trusted_pass
from crossbow_py.engine.fusion.fused_pass import FusedPass, PassNotes
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.engine.tasks import CorrectionTask, LearningTask, Task


class FusedThreadsExecutor(ThreadsExecutor):
    """Runs as many groups of learners as torch has intra-op threads, each in one pass on a thread of its own.

    Raises FusionError as `FusedExecutor` does.
    """

    NAME = "fused_threads"
    FUSES = True
    ORDER = "blocks"

    def __init__(self, tasks: RoundTasks) -> None:
        # Before the threads start: a model that cannot be fused is refused here.
        self._passes = [trusted_pass(tasks, learners=group) for group in self.groups_of(tasks.bank.num_learners)]
        self._pass_notes = PassNotes()
        super().__init__(tasks)

    @classmethod
    def groups_of(cls, num_learners: int) -> list[range]:
        return even_groups(num_learners, torch.get_num_threads())

    def recheck(self) -> None:
        if found := outdated(self.tasks, self._passes[0]):  # all run the same model
            self.notes.append(found)

    def _body(self, task: Task) -> Callable[[RoundOutcome], None]:
        # `task.learner` is a group's index.
        if isinstance(task, LearningTask):
            return partial(self._learn, self._passes[task.learner])
        if isinstance(task, CorrectionTask):
            return partial(self._correct, self.groups[task.learner])
        return super()._body(task)

    def _learn(self, fused: FusedPass, outcome: RoundOutcome) -> None:
        gradients = learn_fused(self.tasks, fused, outcome)
        self._pass_notes.read(fused)
        self.tasks.bank.store_stacked_gradients(gradients, fused.learners)

    def _correct(self, group: range, outcome: RoundOutcome) -> None:
        for learner in group:
            self.tasks.correct(learner, outcome)

    def _wait(self, outcome: RoundOutcome) -> None:
        super()._wait(outcome)
        self.notes += self._pass_notes.take()  # of all groups: each has learned
