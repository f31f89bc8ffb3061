"""The executor over a run's learners: rounds go in, outcomes are counted, learners come and go.

On several ranks all call `drain`, `set_learners`, `shrink`, `reseed` and `move_ema` together. A rank whose learners did
not fit in memory sits out: it takes part in the sums of rounds without adding to them, so that nobody waits for it,
until the ranks have met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from crossbow_py.averaging.rule import OuterStep
from crossbow_py.core.errors import LearnerError
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory
from crossbow_py.engine.rounds import Round, RoundOutcome, taken
from crossbow_py.engine.tasks import AveragingTask
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter

_SUMS_REMEMBERED = 8  # more than an executor has rounds in flight


class RoundRunner:
    """Owned by the training loop.

    Attributes:
        executor: the present one; every change of the number of learners makes another.
        out_of_memory: whether this rank sits out.
    """

    def __init__(self, run: Run, reporter: Reporter) -> None:
        self._run, self.state, self.reporter = run, run.state, reporter
        self.executor = run.new_executor()
        self.out_of_memory = False
        self._sums_begun = self._run.collective.num_sums
        self._sums_due: deque[Round] = deque()  # rounds submitted since, that average
        self._told = set(run.warnings)

    def submit(self, plan: Round) -> bool:
        """Submit a round and absorb the outcome of the one before. False when memory did not hold it: try again.

        On several ranks it is never tried again, as the others have gone on: its samples are not learned from then.
        """
        if self.out_of_memory:
            self._run.sit_out(plan)
            return True
        if plan.together is not None or (self._run.bank.replicas_identical and not self._run.bank.is_single):
            if not self._sums_due:  # none is in flight, but evaluations may have summed since
                self._sums_begun = self._run.collective.num_sums
            self._sums_due.append(plan)
            while len(self._sums_due) > _SUMS_REMEMBERED:
                self._sums_due.popleft()
                self._sums_begun += 1
        done = self._attempt(self.executor.submit, plan)
        if done and plan.outer_step is not None:
            done = self._take_outer_step(plan, plan.outer_step)
        return done or not self._run.collective.is_alone

    def _take_outer_step(self, plan: Round, step: OuterStep) -> bool:
        """Once the round is over. False when memory did not hold it."""
        if not self._attempt(self.executor.drain):
            return False
        with self.executor.span_between(AveragingTask.NAME, plan.index), self._run.collective.awaiting():
            self._run.take_outer_step(step, without=self.state.non_finite_learners)
        self._sums_settled()
        return True

    def settle(self) -> None:
        """See Executor."""
        if not self.out_of_memory:
            self.executor.settle()

    def drain(self) -> bool:
        """Wait for what is in flight; the bank may be read and changed then. False when memory did not hold it."""
        if self.out_of_memory or not self._attempt(self.executor.drain):
            return False
        self._sums_settled()
        self._run.adopt_learner()
        return True

    def _sums_settled(self) -> None:
        """No sum of this rank is in flight."""
        self._sums_begun = self._run.collective.num_sums
        self._sums_due.clear()

    def _attempt(self, work: Callable[..., Sequence[RoundOutcome]], *plan: Round) -> bool:
        """Absorb what the executor yields. False when memory did not hold the learners; some are to be taken away.

        What the others had done in that round stays; its losses are not counted.
        """
        try:
            for outcome in work(*plan):
                self.state.absorb(outcome)
            return True
        except LearnerError as error:
            tuned = self._run.tuning is not None and self._run.bank.num_learners > 1
            if not tuned or not is_out_of_memory(error.__cause__):
                raise
        self.executor.close()
        self.out_of_memory = True
        if not self._run.collective.is_alone:
            done = self._run.collective.num_sums - self._sums_begun
            for missed in list(self._sums_due)[done:]:
                self._run.sit_out(missed)
        self._sums_due.clear()
        return False

    def shrink(self) -> None:
        """Take learners away that memory did not hold, on this rank or another."""
        self.drain()
        self._run.take_replica(is_whole=not self.out_of_memory)
        self.out_of_memory = False
        self.set_learners(self._give_up_learners())

    def set_learners(self, num_learners: int) -> None:
        """Grow or shrink the drained bank; what memory does not hold, the auto-tuner takes back."""
        bank, given_up = self._run.bank, False
        self.executor.close()
        self.reseed()
        self._run.bring_up_to_date()
        while True:
            failed = False
            try:
                bank.resize(num_learners)
                if given_up:
                    bank.trim()
                self.executor = self._run.new_executor()
            except (RuntimeError, MemoryError) as error:
                if num_learners == 1 or self._run.tuning is None or not is_out_of_memory(error):
                    raise
                failed = True
            # Out of the except block, the error is gone, and with it what its frames held.
            if not any(self._run.ranks.sum([failed])):
                self._sums_begun = self._run.collective.num_sums
                return
            if not failed:
                self.executor.close()
            num_learners, given_up = self._give_up_learners(), True

    def _give_up_learners(self) -> int:
        """How many learners memory may hold, after it did not hold the last number."""
        assert self._run.tuning is not None, "only the auto-tuner changes the number of learners"
        free_memory(self._run.choices.device)
        decision = self._run.tuning.out_of_memory()
        self.reporter.decision(decision, self.state.samples_seen)
        return decision.num_learners

    def restart(self) -> None:
        """Restart the learners from z, when nothing is in flight."""
        self._run.restart()
        self.reporter.message("The learning rate dropped: learners restart from the average model.")

    def move_ema(self) -> None:
        """Let the EMA of the average model follow it, when nothing is in flight."""
        with self.executor.span_between("average EMA", self.state.round_index - 1):
            self._run.move_ema()

    def reseed(self) -> None:
        """Clone learners that were gated from z, when nothing is in flight."""
        bank, ranks = self._run.bank, self._run.ranks
        non_finite, self.state.non_finite_learners = self.state.non_finite_learners, {}
        (everywhere,) = ranks.sum([len(non_finite)])
        if not everywhere:
            return
        healthy = [learner for learner in range(bank.num_learners) if learner not in non_finite]
        buffers = bank.central_buffers(healthy, ranks.adder)
        bank.reseed(non_finite, buffers)
        said = [
            f"Learner {bank.first_learner + learner} went non-finite in round {round_index} and was reseeded from the "
            "average model."
            for learner, round_index in sorted(non_finite.items())
        ]
        for text in ranks.gather_texts("\n".join(said)):
            for line in text.splitlines():
                self.reporter.message(line)
        self.state.num_reseeded += int(everywhere)

    def recheck(self) -> None:
        """Say where the executor no longer gives the model's own numbers, when nothing is in flight."""
        if not self.out_of_memory:
            self.executor.recheck()
            self.tell_notes()

    def tell_notes(self) -> None:
        """Pass on what the executor and the feeds have to say, once."""
        notes = [*taken(self.executor.notes), *self._run.feed_notes()]
        for note in notes:
            if note not in self._told:  # every change of the number of learners makes a new executor
                self.reporter.message(note)
            self._told.add(note)

    def close(self) -> None:
        """See Executor."""
        self.executor.close()
