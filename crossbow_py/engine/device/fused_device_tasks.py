"""Task bodies for several learners in one pass that never block the host; see `device_tasks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch, MemoryOrder
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.device.device_tasks import LOSS, NUM_CORRECT, RoundValues, average_gated
from crossbow_py.engine.fusion.fused_agreement import trusted_pass
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.modules.dropout import MaskTape
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.device_update import AllLearners
from crossbow_py.engine.update.kernel_update import KernelUpdate, choose_kernel_update, move_z


class FusedDeviceTasks(RoundValues):
    """Bodies for several learners at once, over a bank in `blocks`, on one stream.

    Args:
        tasks: what to compute.
        fused: the forward and backward pass of the learners.
        update: corrections by kernels, or None for operators, which must have all learners of the bank.
        gathers: whether `learn`, and so a graph of it, gathers the batch from the feed's picks.
        executor: its name, for messages.
    """

    def __init__(
        self, tasks: RoundTasks, fused: FusedPass, update: KernelUpdate | None, gathers: bool, executor: str = "fused"
    ) -> None:
        super().__init__(tasks, executor, fused.learners)
        self._pass, self._kernels = fused, update
        self._rows = None if update else AllLearners(tasks.bank, tasks.update.optimizer)
        self._feed = tasks.feed if gathers and isinstance(tasks.feed, ResidentFeed) else None
        self._batch: Batch | None = None
        # If `learn` gathers: the picks and the gathered batch, for one or K batches.
        self._picked: dict[int, tuple[Tensor, Batch]] = {}
        self._loaded_rates: tuple[float, ...] = ()
        self._tape = MaskTape()

    def load(self, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """Do as `DeviceTasks.load`, for every learner."""
        bank, rates = self.tasks.bank, plan.learning_rates[self.learners.start : self.learners.stop]
        if self._pass.graph.draws:
            for learner in self.learners:
                self._seed(learner, plan)
            if masks_ahead:
                self._tape.draw()
        if bank_changed:
            for row, learner in enumerate(self.learners):
                self._counts[row].fill_(bank.step_counts[learner])
        if rates != self._loaded_rates:
            self._load_rates(rates)
        if self._feed is not None:
            starts = self._pass.starts(plan)
            self._feed.write_picks(starts, self._picked_for(self._feed, len(starts))[0])
        else:
            self._batch = self._keep(self._batch, self._pass.batch(plan))

    def shares(self, plan: Round) -> bool:
        """Return whether the learners take the same batch, which has a graph of its own."""
        return self._pass.shares(plan)

    def _picked_for(self, feed: ResidentFeed, num_batches: int) -> tuple[Tensor, Batch]:
        """Return static picks and batches, made at first use, which is never during a capture."""
        if num_batches not in self._picked:
            channels = self._pass.graph.takes_channels and num_batches > 1
            order: MemoryOrder = "channels" if channels else "stacked"
            self._picked[num_batches] = feed.new_picks(num_batches), feed.new_batches(num_batches, order)
        return self._picked[num_batches]

    def _loaded(self, shared: bool) -> Batch:
        """Return the round's batches, gathered now if `learn` does this."""
        if self._feed is None:
            assert self._batch is not None, "a round needs a loaded batch"
            return self._batch
        picks, batch = self._picked[1 if shared else len(self.learners)]
        self._feed.take(picks, batch)
        return Batch(*(each[0] for each in batch)) if shared else batch

    def _load_rates(self, rates: tuple[float, ...]) -> None:
        if len(set(rates)) == 1:
            self._rates.fill_(rates[0])
        else:
            for learner, rate in enumerate(rates):
                self._rates[learner].fill_(rate)
        self._loaded_rates = rates

    def learn(self, shared: bool, masks_ahead: bool) -> None:
        """Run the learning tasks of a round on the loaded batch, which learners may share."""
        bank, results, k = self.tasks.bank, self._results, len(self.learners)
        with self._tape.over(masks_ahead):
            learned = self._pass.learn(self._loaded(shared), shared)
        bank.store_stacked_gradients(learned.gradients, self.learners)
        results[:k, LOSS].copy_(learned.losses)
        if learned.num_correct is not None:
            results[:k, NUM_CORRECT].copy_(learned.num_correct)
        self._classifies = [learned.num_correct is not None] * k

    def correct(self, averaging: LinearRound | None) -> None:
        """Run the correction tasks of a round; see `DeviceUpdate.correct`."""
        if self._kernels is not None:
            self._kernels.correct(
                averaging, results=self._results, loss_column=self._loss_gate, finite_column=self._gate,
                learning_rates=self._rates, step_counts=self._counts,
            )  # fmt: skip
            return
        assert self._rows is not None, "operators need all rows end to end"
        results = self._results
        self.update.correct(
            self._rows,
            averaging,
            loss=results[:, self._loss_gate],
            learning_rate=self._rates,
            step_count=self._counts,
            finite=results[:, self._gate],
        )

    @property
    def moves_z(self) -> bool:
        """Whether `correct` also moves z, so that `average` has nothing to do."""
        return self._kernels is not None and self._kernels.moves

    def average(self, outcome: RoundOutcome) -> None:
        """Move z unless `correct` has; kernels have already summed the corrections."""
        if self._kernels is None:
            super().average(outcome)
        elif not self._kernels.moves:
            self.tasks.move(outcome, self._kernels.move)

    def report(self, host: Tensor) -> None:
        """Copy the results to `host` [K, 4], pinned memory on CUDA, without blocking."""
        own = host[self.learners.start : self.learners.stop]
        own.copy_(self._results[: len(self.learners)], non_blocking=True)


class SubArrayTasks:
    """Bodies for groups of neighbouring learners, each fused and on a stream of its own; `average` comes after all.

    They are like `DeviceTasks`, with a group in place of a learner.

    Args:
        tasks: what to compute, over a bank in `blocks`.
        groups: the groups of learners, at most four.
        executor: its name, for messages.

    Attributes:
        notes: messages for the user about slower operation; the reader clears it.

    Raises:
        UserError: the update kernels cannot be used, without which groups cannot be updated side by side.
        FusionError: the model cannot be fused.
    """

    def __init__(self, tasks: RoundTasks, groups: Sequence[range], executor: str) -> None:
        self._tasks, self.notes = tasks, list[str]()
        optimizer, rule = tasks.update.optimizer, tasks.update.rule
        self._groups, self._totals = [], []
        for learners in groups:
            update, reason = choose_kernel_update(tasks.bank, optimizer, rule, moves=False, learners=learners)
            if update is None:
                reason = reason or f"There are none for optimizer={optimizer.NAME} with averaging={rule.NAME}."
                raise UserError(f"executor={executor} needs the update kernels. {reason} Set executor=fused.")
            fused = trusted_pass(tasks, kernels=True, learners=learners)
            self._groups.append((fused, FusedDeviceTasks(tasks, fused, update, gathers=True, executor=executor)))
            self._totals.append(update.total)

    def variant(self, group: int, plan: Round) -> bool:
        """Return what `learn` is captured separately for: whether the group shares a batch."""
        return self._groups[group][1].shares(plan)

    def load(self, group: int, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """See `FusedDeviceTasks.load`."""
        self._groups[group][1].load(plan, bank_changed, masks_ahead)

    def learn(self, group: int, plan: Round, masks_ahead: bool) -> None:
        """See `FusedDeviceTasks.learn`."""
        fused, bodies = self._groups[group]
        bodies.learn(bodies.shares(plan), masks_ahead)
        self.notes += fused.notes
        fused.notes.clear()

    def average_gradients(self) -> None:
        """See `average_gated`."""
        average_gated(self._tasks, [bodies for _, bodies in self._groups])

    def correct(self, group: int, averaging: LinearRound | None) -> None:
        """See `FusedDeviceTasks.correct`; the sum of the group's corrections goes to a vector of its own."""
        self._groups[group][1].correct(averaging)

    def average(self, outcome: RoundOutcome) -> None:
        """Move z by all groups' corrections, summed over devices."""
        totals, coefficients = self._totals, outcome.plan.averaging
        if not self._tasks.collective.is_alone or (coefficients and coefficients.share != 1):
            for total in totals[1:]:
                totals[0].storage.add_(total.storage)
            totals = totals[:1]
        self._tasks.move(outcome, partial(move_z, self._tasks.bank, totals))

    def report(self, group: int, host: Tensor) -> None:
        """See `FusedDeviceTasks.report`."""
        self._groups[group][1].report(host)

    def read(self, outcome: RoundOutcome, host: Tensor) -> None:
        """See `RoundValues.read`."""
        for _, bodies in self._groups:
            bodies.read(outcome, host)

    def count_steps(self) -> None:
        """See `RoundValues.count_steps`."""
        for _, bodies in self._groups:
            bodies.count_steps()
