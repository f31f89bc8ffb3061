"""A run's learners between rounds: their executor, their number, and what happens to all of them at once.

Every function is called by all ranks together, with nothing in flight, unless it says otherwise.
"""

from __future__ import annotations

from crossbow_py.core.errors import LearnerError
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.rounds import Round, RoundTasks, smoothing_rows, take_all
from crossbow_py.engine.tasks import AveragingTask
from crossbow_py.engine.update.outer_step import take_outer_step
from crossbow_py.train.loop.average_model import bring_up_to_date, restart
from crossbow_py.train.loop.out_of_memory import OutOfMemory
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter
from crossbow_py.train.tuning.executor_choice import executor_for


class Learners:
    """The learners of a run and the executor that trains them, which every change of their number makes anew.

    Attributes:
        executor: the current executor.
        memory: the policy of a rank whose learners do not fit in memory.
        in_flight: whether a round is in flight, so that nobody may read the bank.
    """

    def __init__(self, run: Run, reporter: Reporter) -> None:
        self._run, self._reporter = run, reporter
        self.executor = new_executor(run)
        self.memory = OutOfMemory(run, self.executor.tasks)
        self.in_flight = False

    def sit_out(self) -> None:
        """Have this rank sit out, as a round did not fit in memory. For each rank by itself."""
        self.executor.close()
        self.memory.sit_out_from_here()

    def settle(self) -> None:
        """Wait for what is in flight, without absorbing outcomes; see `Executor.settle`. For each rank by itself."""
        if not self.memory.sits_out:
            self.executor.settle()

    def drain(self) -> bool:
        """Wait for what is in flight, and absorb it; then the bank may be changed. For each rank by itself.

        Returns False if it did not fit in memory.
        """
        if self.memory.sits_out:
            return False
        try:
            for outcome in self.executor.drain():
                self._run.state.absorb(outcome)
        except LearnerError as error:
            self.memory.check(error)
        else:
            self.memory.settled()
            self.in_flight = False
            self._run.bank.adopt_learner()
            return True
        # Outside the except block the error is gone, and with it the memory that its frames held.
        self.sit_out()
        return False

    def take_outer_step(self, plan: Round) -> None:
        """Take a round's outer step once its tasks are over; see `engine/update/outer_step.py`."""
        run = self._run
        for outcome in self.executor.drain():
            run.state.absorb(outcome)
        assert plan.outer_step is not None, "asked of rounds that have one"
        with self.executor.span_between(AveragingTask.NAME, plan.index), run.collective.awaiting():
            without = run.state.non_finite_learners
            take_outer_step(run.bank, plan.outer_step, run.collective, run.ranks.adder, without=without)
        self.memory.settled()

    def shrink(self) -> None:
        """Remove learners that did not fit in memory, on this rank or another."""
        self.drain()
        self._take_replica(is_intact=not self.memory.sits_out)
        self.memory.sits_out = False
        self.resize(self._give_up_some())

    def resize(self, num_learners: int) -> None:
        """Grow or shrink the bank; if that does not fit in memory, the auto-tuner chooses a smaller number."""
        bank, given_up = self._run.bank, False
        self.executor.close()
        self.in_flight = False
        self.reseed()
        bring_up_to_date(self._run)
        while True:
            failed = False
            try:
                bank.resize(num_learners)
                if given_up:
                    bank.trim()
                self.executor = new_executor(self._run)
            except (RuntimeError, MemoryError) as error:
                if num_learners == 1 or self._run.tuning is None or not is_out_of_memory(error):
                    raise
                failed = True
            # Outside the except block the error is gone, and with it the memory that its frames held.
            if not any(self._run.ranks.sum([failed])):
                self.memory.settled()
                return
            if not failed:
                self.executor.close()
            num_learners, given_up = self._give_up_some(), True

    def _give_up_some(self) -> int:
        """Return the number of learners to try after the last number did not fit in memory."""
        run = self._run
        assert run.tuning is not None, "only the auto-tuner changes the number of learners"
        free_memory(run.choices.device)
        decision = run.tuning.out_of_memory(run.state.noise)
        self._reporter.decision(decision, run.state.samples_seen)
        return decision.num_learners

    def _take_replica(self, is_intact: bool) -> None:
        """Copy a replica from a rank where it is intact, if all replicas are equal."""
        bank, ranks = self._run.bank, self._run.ranks
        if bank.replicas_identical:
            found = ranks.gather([is_intact, bank.step_counts[0]])
            source = next((rank for rank, (intact, _) in enumerate(found) if intact), 0)
            ranks.copy_from(source, bank.replica_tensors(0, all(steps for _, steps in found)))
            bank.step_counts[0] = int(found[source][1])
            bank.refresh_shadow(0)
        bank.align_groups()
        bank.adopt_learner()

    def restart(self) -> None:
        """Restart the learners from z."""
        restart(self._run)
        self._reporter.message("The learning rate dropped: learners restart from the average model.")

    def reseed(self) -> None:
        """Clone gated learners from z."""
        run, bank = self._run, self._run.bank
        non_finite, run.state.non_finite_learners = run.state.non_finite_learners, {}
        (num_reseeded,) = run.ranks.sum([len(non_finite)])
        if not num_reseeded:
            return
        finite = [learner for learner in range(bank.num_learners) if learner not in non_finite]
        bank.reseed(non_finite, bank.central_buffers(finite, run.ranks.adder))
        said = [
            f"Learner {bank.first_learner + learner} went non-finite in round {round_index} and was reseeded from the "
            "average model."
            for learner, round_index in sorted(non_finite.items())
        ]
        for text in run.ranks.gather_texts("\n".join(said)):
            for line in text.splitlines():
                self._reporter.message(line)
        run.state.num_reseeded += int(num_reseeded)

    def recheck(self) -> None:
        """Note if the executor no longer gives the model's own numbers. For each rank by itself."""
        if not self.memory.sits_out:
            self.executor.recheck()

    def take_notes(self) -> list[str]:
        """Return the messages of the executor, the data and the run since the last call."""
        of_feeds = dict.fromkeys(note for feed in self._run.feeds for note in feed.take_notes())
        return [*take_all(self.executor.notes), *take_all(self._run.notes), *of_feeds]

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()
        self.in_flight = False


def new_executor(run: Run) -> Executor:
    """Return a new executor over the bank. It may start threads: close it."""
    name = executor_for(run.bank.num_learners, run.settings, run.choices, run.ranks.num_ranks)
    executor = EXECUTORS[name](round_tasks(run))
    if run.timeline is not None:
        executor.trace(run.timeline)
    run.ranks.watch.running = executor.running
    return executor


def round_tasks(run: Run) -> RoundTasks:
    """Return the bodies of the tasks of a run's rounds."""
    return RoundTasks(
        run.bank,
        update=run.update,
        feed=run.train_feed,
        loss=run.loss,
        seed=run.settings.seed,
        collective=run.collective,
        compile_model=run.settings.compile_model,
        accumulate=run.settings.accumulate,
        cache_features=run.settings.cache_features,
        compares=run.state.noise is not None,
        label_smoothing=smoothing_rows(run.settings.label_smoothing, run.bank),
    )


def compare_alone(run: Run, plan: Round) -> None:
    """Compare the gradients of a single learner by the batch of a round that has not begun.

    Host–device synchronisation on CUDA.
    """
    found = round_tasks(run).compare_halves(0, run.train_feed.batch(plan.starts[0]))
    if found is not None:
        run.state.compared.append((plan.index, found))
