"""Runs rounds through the executor, counts their outcomes, and changes the number of learners.

All ranks call `drain`, `set_learners`, `shrink`, `reseed` and `move_ema` together. A rank whose learners did not fit in
memory sits out until the ranks synchronise: it takes part in the sums of rounds without adding to them, so that the
other ranks do not wait for it.
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
    """Runs the rounds of a run. Owned by the training loop.

    Attributes:
        executor: the current executor; every change of the number of learners makes a new one.
        out_of_memory: whether this rank sits out.
    """

    def __init__(self, run: Run, reporter: Reporter) -> None:
        self._run, self.state, self.reporter = run, run.state, reporter
        self.executor = run.new_executor()
        self.out_of_memory = False
        self._sums_begun = self._run.collective.num_sums
        self._sums_due: deque[Round] = deque()  # averaging rounds submitted since
        self._told = run.told
        self._told.update(run.warnings)

    def submit(self, plan: Round) -> bool:
        """Submit a round and absorb the outcome of the one before. Returns False if it is to be submitted again.

        That is when it did not fit in memory. On several ranks it is never submitted again, because the other ranks
        have gone on: this rank then learns nothing from its samples.
        """
        self._run.in_flight = True
        if self.out_of_memory:
            self._run.sit_out(plan)
            return True
        if plan.averages or (self._run.bank.replicas_identical and not self._run.bank.is_single):
            if not self._sums_due:  # no sum is in flight, but evaluations may have called the collective since
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
        """Take the outer step once the round is over. Returns False if the round did not fit in memory."""
        if not self._attempt(self.executor.drain):
            return False
        with self.executor.span_between(AveragingTask.NAME, plan.index), self._run.collective.awaiting():
            self._run.take_outer_step(step, without=self.state.non_finite_learners)
        self._sums_settled()
        return True

    def settle(self) -> None:
        """Wait for what is in flight, without absorbing outcomes; see `Executor.settle`."""
        if not self.out_of_memory:
            self.executor.settle()

    def drain(self) -> bool:
        """Wait for what is in flight; the bank may be changed then. Returns False if it did not fit in memory."""
        if self.out_of_memory or not self._attempt(self.executor.drain):
            return False
        self._sums_settled()
        self._run.in_flight = False
        self._run.adopt_learner()
        return True

    def _sums_settled(self) -> None:
        """Note that no sum of this rank is in flight."""
        self._sums_begun = self._run.collective.num_sums
        self._sums_due.clear()

    def _attempt(self, work: Callable[..., Sequence[RoundOutcome]], *plan: Round) -> bool:
        """Absorb what the executor yields. Returns False if the learners did not fit in memory.

        Then some have to be removed. Steps that learners took in that round stay; its losses are not counted.
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
        """Remove learners that did not fit in memory, on this rank or another."""
        self.drain()
        self._run.take_replica(is_intact=not self.out_of_memory)
        self.out_of_memory = False
        self.set_learners(self._give_up_learners())

    def set_learners(self, num_learners: int) -> None:
        """Grow or shrink the drained bank; if that does not fit in memory, the auto-tuner chooses a smaller number."""
        bank, given_up = self._run.bank, False
        self.executor.close()
        self._run.in_flight = False
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
            # Outside the except block the error is gone, and with it the memory that its frames held.
            if not any(self._run.ranks.sum([failed])):
                self._sums_begun = self._run.collective.num_sums
                return
            if not failed:
                self.executor.close()
            num_learners, given_up = self._give_up_learners(), True

    def _give_up_learners(self) -> int:
        """Return the number of learners to try after the last number did not fit in memory."""
        assert self._run.tuning is not None, "only the auto-tuner changes the number of learners"
        free_memory(self._run.choices.device)
        decision = self._run.tuning.out_of_memory(self.state.noise)
        self.reporter.decision(decision, self.state.samples_seen)
        return decision.num_learners

    def restart(self) -> None:
        """Restart the learners from z. Nothing is in flight."""
        self._run.restart()
        self.reporter.message("The learning rate dropped: learners restart from the average model.")

    def move_ema(self) -> None:
        """Update the EMA of the average model. Nothing is in flight."""
        with self.executor.span_between("average EMA", self.state.round_index - 1):
            self._run.move_ema()

    def reseed(self) -> None:
        """Clone gated learners from z. Nothing is in flight."""
        bank, ranks = self._run.bank, self._run.ranks
        non_finite, self.state.non_finite_learners = self.state.non_finite_learners, {}
        (num_reseeded,) = ranks.sum([len(non_finite)])
        if not num_reseeded:
            return
        finite = [learner for learner in range(bank.num_learners) if learner not in non_finite]
        buffers = bank.central_buffers(finite, ranks.adder)
        bank.reseed(non_finite, buffers)
        said = [
            f"Learner {bank.first_learner + learner} went non-finite in round {round_index} and was reseeded from the "
            "average model."
            for learner, round_index in sorted(non_finite.items())
        ]
        for text in ranks.gather_texts("\n".join(said)):
            for line in text.splitlines():
                self.reporter.message(line)
        self.state.num_reseeded += int(num_reseeded)

    def recheck(self) -> None:
        """Report if the executor no longer gives the model's own numbers. Nothing is in flight."""
        if not self.out_of_memory:
            self.executor.recheck()
            self.tell_notes()

    def tell_notes(self) -> None:
        """Pass on messages of the executor and the feeds, each once."""
        notes = [*taken(self.executor.notes), *self._run.feed_notes()]
        for note in notes:
            if note not in self._told:  # every change of the number of learners makes a new executor
                self.reporter.message(note)
            self._told.add(note)

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()
        self._run.in_flight = False
