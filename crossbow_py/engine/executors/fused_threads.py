"""The CPU executor `fused_threads`, between `threads` and `fused`: groups of fused learners, each on a thread.

Fusing gives operators more work than one small batch does. With one intra-op thread for each group, cores need not wait
for each other after every operator, which costs most when other programs run too. Tasks, order and overlap are those of
`threads.py` with a group in place of a learner. Learners in one row step once, on the thread that sums gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from crossbow_py.engine.executors.base import even_groups
from crossbow_py.engine.executors.fused import learn_fused
from crossbow_py.engine.executors.threads import ThreadsExecutor
from crossbow_py.engine.fusion.fused_agreement import outdated, trusted_pass
from crossbow_py.engine.fusion.fused_pass import PassNotes
from crossbow_py.engine.rounds import GradientSum, RoundOutcome, RoundTasks, comparison_of
from crossbow_py.engine.tasks import ComparisonTask, CorrectionTask, GradientMeanTask, LearningTask, Task


class FusedThreadsExecutor(ThreadsExecutor):
    """Runs as many groups of learners as torch has intra-op threads, each in one pass on a thread of its own.

    Raises FusionError as `FusedExecutor` does.
    """

    NAME = "fused_threads"
    FUSES = True
    ORDER = "blocks"
    HAS_ONE_ROW = True

    def __init__(self, tasks: RoundTasks) -> None:
        # Before the threads start: a model that cannot be fused is refused here.
        self._passes = [trusted_pass(tasks, learners=group) for group in self.groups_of(tasks.bank.num_learners)]
        self._pass_notes = PassNotes()
        # Of learners in one row, by group: the sum of its gradients in this round, and what a comparison needs.
        self._sums: list[Sequence[Tensor | None]] = [()] * len(self._passes)
        self._apart = [GradientSum([], [])] * len(self._passes)
        super().__init__(tasks)

    @classmethod
    def groups_of(cls, num_learners: int) -> list[range]:
        return even_groups(num_learners, torch.get_num_threads())

    def recheck(self) -> None:
        if found := outdated(self.tasks, self._passes[0]):  # all run the same model
            self.notes.append(found)

    def _body(self, task: Task) -> Callable[[RoundOutcome], None]:
        # `task.learner` is a group's index.
        one_row = self.tasks.bank.one_row
        if isinstance(task, LearningTask):
            return partial(self._learn, task.learner)
        if isinstance(task, CorrectionTask):
            return partial(self._correct, range(0) if one_row else self.groups[task.learner])
        if isinstance(task, ComparisonTask) and one_row:
            return self._compare_one_row
        if isinstance(task, GradientMeanTask) and one_row:
            return self._correct_one_row
        return super()._body(task)

    def _learn(self, group: int, outcome: RoundOutcome) -> None:
        fused, bank = self._passes[group], self.tasks.bank
        if bank.one_row and outcome.plan.compares:  # by modules: the graph of learners in one row has but the sum
            self._apart[group] = own = self.tasks.learn_apart(fused.learners, outcome)
            self._sums[group] = own.total
            return
        gradients = learn_fused(self.tasks, fused, outcome)
        self._pass_notes.read(fused)
        if bank.one_row:
            self._sums[group] = gradients
        else:
            bank.store_stacked_gradients(gradients, fused.learners)

    def _compare_one_row(self, outcome: RoundOutcome) -> None:
        outcome.comparison = comparison_of(*self._apart)
        self._apart = [GradientSum([], [])] * len(self._passes)

    def _correct_one_row(self, outcome: RoundOutcome) -> None:
        """Step the row of all learners by the sum of all groups' gradients."""
        tasks, plan = self.tasks, outcome.plan

        def alone() -> Iterator[list[Tensor]]:
            for each in self._passes:
                yield from tasks.gradients_alone(plan, each.inputs(plan), each.shares(plan), each.learners)

        first, *others = self._sums
        self._sums = [()] * len(self._passes)  # the memory of all is free while the next ones are made
        tasks.correct_one_row(first, outcome, alone, others)

    def _correct(self, learners: range, outcome: RoundOutcome) -> None:
        for learner in learners:
            self.tasks.correct(learner, outcome)

    def _wait(self, outcome: RoundOutcome) -> None:
        super()._wait(outcome)
        self.notes += self._pass_notes.take()  # of all groups: each has learned
