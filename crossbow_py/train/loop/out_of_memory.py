"""The policy of a rank whose learners do not fit in memory: it sits out until the ranks synchronise.

Until then it takes part in the sums of rounds without adding to them, so that the other ranks do not wait for it, and
its z moves as theirs. Then all ranks go on with fewer learners.
"""

from __future__ import annotations

from collections import deque

from crossbow_py.core.errors import LearnerError
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.outer_step import take_outer_step
from crossbow_py.train.run import Run

_SUMS_REMEMBERED = 8  # more than an executor has rounds in flight


class OutOfMemory:
    """Counts this rank's part in the sums of rounds, and takes part without its learners if they do not fit.

    Attributes:
        sits_out: whether this rank's learners did not fit, and learn nothing until ranks synchronise.
    """

    def __init__(self, run: Run, tasks: RoundTasks) -> None:
        self._run, self._tasks = run, tasks
        self.sits_out = False
        self._sums_begun = run.collective.num_sums
        self._sums_due: deque[Round] = deque()  # rounds submitted since, which sum over ranks

    def submitted(self, plan: Round) -> None:
        """Note that a round is about to be submitted, which may sum over ranks."""
        bank = self._run.bank
        if not plan.averages and (bank.is_single or not bank.replicas_identical):
            return
        if not self._sums_due:  # no sum is in flight, but evaluations may have called the collective since
            self._sums_begun = self._run.collective.num_sums
        self._sums_due.append(plan)
        while len(self._sums_due) > _SUMS_REMEMBERED:
            self._sums_due.popleft()
            self._sums_begun += 1

    def settled(self) -> None:
        """Note that no sum of this rank is in flight."""
        self._sums_begun = self._run.collective.num_sums
        self._sums_due.clear()

    def check(self, error: LearnerError) -> None:
        """Raise the error, unless fewer learners may help: memory ran out, and their number is tuned."""
        tuned = self._run.tuning is not None and self._run.bank.num_learners > 1
        if not tuned or not is_out_of_memory(error.__cause__):
            raise error

    def sit_out_from_here(self) -> None:
        """Sit out, and take part in the sums of rounds that were in flight. The executor is closed.

        Steps that learners took in the failed round stay; its losses are not counted.
        """
        self.sits_out = True
        if not self._run.collective.is_alone:
            done = self._run.collective.num_sums - self._sums_begun
            for missed in list(self._sums_due)[done:]:
                self.sit_out(missed)
        self._sums_due.clear()

    def sit_out(self, plan: Round) -> None:
        """Take part in a round without this device's learners: they add nothing, and z moves as elsewhere."""
        run, bank = self._run, self._run.bank
        if plan.averaging is not None:
            if plan.averages:
                bank.total.zero_row(0)
                self._tasks.move(RoundOutcome(plan))
        elif bank.replicas_identical:  # its learners do not step until they get another rank's weights
            bank.total.zero_row(0)
            run.collective.all_reduce_sum(bank.total.storage)
        if plan.outer_step is not None:
            take_outer_step(bank, plan.outer_step, run.collective, run.ranks.adder, adds=False)
