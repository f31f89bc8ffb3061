"""Task bodies that a CUDA graph can hold: they never block the host, and read and write tensors with fixed addresses.

They compute what `RoundTasks` computes, for a group of neighbouring learners on one stream. The host hands over a round
with `load` (batch, learning rates, dropout masks), outside any graph; the bodies then read only static tensors;
`report` copies their results to the host, which reads them with `read` once the stream has passed. `LearnerTasks` runs
one learner, `FusedTasks` several in one pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from operator import itemgetter

import torch
from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import call, detached, leaves
from crossbow_py.data.feed import Batch, Feed, MemoryOrder
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.bank.layout import copy_present
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.goodput import Comparison
from crossbow_py.engine.modules.dropout import MaskTape
from crossbow_py.engine.modules.losses import correct_of_batch
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.device_update import AllLearners, DeviceUpdate, OneLearner, keep_bits
from crossbow_py.engine.update.kernel_update import KernelUpdate

NUM_RESULTS = 6  # of a learner in a round; the last two are of the device's gradients, by its first learner
LOSS, NUM_CORRECT, FINITE, STEPPED, MEAN_SQUARE, SQUARE_OF_MEAN = range(NUM_RESULTS)


class GroupTasks(ABC):
    """The tasks of a group, its inputs and its results: K learners, and one more entry that belongs to no learner.

    Bodies enqueue work on the current stream, record no events, and leave the order to the executor.

    Args:
        tasks: what to compute.
        executor: its name, for messages.
        learners: K neighbouring learners.

    Attributes:
        notes: messages for the user about slower operation; the reader clears it.

    Raises UserError for an optimizer without a device update.
    """

    def __init__(self, tasks: RoundTasks, executor: str, learners: range) -> None:
        self.learners, self.tasks, self._executor = learners, tasks, executor
        bank, entries = tasks.bank, len(learners) + 1
        self.notes: list[str] = []
        self.update = DeviceUpdate(tasks.update.optimizer, tasks.update.rule, bank.device)
        self._rates, self._counts = (torch.zeros(entries, dtype=torch.float64, device=bank.device) for _ in range(2))
        self._results = torch.zeros(entries, NUM_RESULTS, dtype=torch.float64, device=bank.device)
        self._classifies = False
        self._batch: Batch | None = None
        self._feed: ResidentFeed | None = None  # that `learn` gathers the batch from
        self._loaded_rates: tuple[float, ...] = ()
        self._tapes = {shared: MaskTape() for shared in (False, True)}
        # Learners that share a gradient step if it is finite and their group is kept (`average_gated`); their own
        # losses do not count here, as `average_gated` or `average_sum` has checked them.
        shares = tasks.gradient_mean is not None or bank.one_row
        self._loss_gate, self._gate = (STEPPED, STEPPED) if shares else (LOSS, FINITE)

    def load(self, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """Hand over a round: batch, dropout masks, and learning rates and step counts if they changed.

        The batch, or what `learn` gathers it by, is copied to the static tensors that the graph reads. The host waits
        only if the feed makes it. Raises UserError for a batch of another shape or dtype than earlier ones.

        Args:
            plan: the plan of the round.
            bank_changed: whether the caller had the bank since the last round, so that step counts are read from it.
            masks_ahead: whether to draw dropout masks now, as `learn` will be captured or replayed; else it will draw.
        """
        bank, rates = self.tasks.bank, plan.learning_rates[self.learners.start : self.learners.stop]
        if self._draws:
            for learner in self.learners:
                self.tasks.seed_dropout(learner, plan)
            if masks_ahead:
                self._tapes[self.shares(plan)].draw()
        if bank_changed:
            for row, learner in enumerate(self.learners):
                self._counts[row].fill_(bank.step_counts[learner])
        if rates != self._loaded_rates:
            if len(set(rates)) == 1:
                self._rates.fill_(rates[0])
            else:
                for row, rate in enumerate(rates):
                    self._rates[row].fill_(rate)
            self._loaded_rates = rates
        self._load_batch(plan)

    @property
    def gathers_by_kernel(self) -> bool:
        """True if a kernel makes the batches, in `learn`."""
        return self._feed is not None and self._feed.has_kernel

    @property
    @abstractmethod
    def _draws(self) -> bool:
        """True if `learn` draws dropout masks."""

    @abstractmethod
    def _load_batch(self, plan: Round) -> None:
        """Hand over the round's batch; see `load`."""

    def _keep(self, batch: Batch) -> None:
        """Copy the batch to static tensors, which the first one makes. Raises UserError if shape or dtype differ."""
        self._batch = self._batch or batch.map(torch.empty_like)
        for kept, given in zip(leaves(self._batch), leaves(batch), strict=True):
            if (kept.shape, kept.dtype) != (given.shape, given.dtype):
                raise UserError(
                    f"executor={self._executor} needs batches of one shape, got {list(given.shape)} of {given.dtype} "
                    f"after {list(kept.shape)} of {kept.dtype}; set executor=serial."
                )
            kept.copy_(given)

    def shares(self, plan: Round) -> bool:
        """Return whether several learners take the same batch, for which `learn` is captured separately."""
        return False

    @abstractmethod
    def learn(self, shared: bool, masks_ahead: bool) -> None:
        """Write the gradients of the learners' losses on the loaded batch to G, at w; losses and counts to the results.

        `shared` is what `shares` returns for the round, and `masks_ahead` says whether `load` has drawn its masks. All
        graphs with the same `shared` read the same masks, as `load` draws them anew for each replay.
        """

    @abstractmethod
    def correct(self, averaging: LinearRound | None) -> None:
        """Run the correction tasks of a round; see `DeviceUpdate.correct`."""

    def report(self, host: Tensor) -> None:
        """Copy the results to the learners' rows of `host` [K, 6], pinned memory on CUDA, without blocking."""
        own = host[self.learners.start : self.learners.stop]
        own.copy_(self._results[: len(self.learners)], non_blocking=True)

    def results(self) -> dict[int, Tensor]:
        """Return each learner's results of a round on the device, views `[NUM_RESULTS]`."""
        return dict(zip(self.learners, self._results, strict=False))

    def read(self, outcome: RoundOutcome, host: Tensor) -> None:
        """Fill the outcome from `host` [K, 6] and count the steps in the bank. The host must have waited for `host`."""
        for learner in self.learners:
            values = host[learner].tolist()
            outcome.losses[learner] = values[LOSS]
            outcome.num_correct[learner] = values[NUM_CORRECT] if self._classifies else None
            stepped = values[self._gate] == 1
            # Of learners in one row, which are held back together, those that are no cause of it are finite.
            outcome.finite[learner] = (stepped or self.tasks.bank.one_row) and values[FINITE] == 1
            self.tasks.bank.step_counts[learner] += stepped
            if learner == 0 and outcome.plan.compares:
                n = self.tasks.bank.num_learners
                outcome.comparison = Comparison(values[MEAN_SQUARE], values[SQUARE_OF_MEAN], n)

    def count_steps(self) -> None:
        """Copy the step counts from the device to the bank. The host must have waited for all rounds."""
        counts = self._counts[: len(self.learners)].tolist()  # host–device synchronisation
        self.tasks.bank.step_counts[self.learners.start : self.learners.stop] = [int(count) for count in counts]


def average_gated(groups: Sequence[GroupTasks]) -> None:
    """Do as `RoundTasks.average_gradients`, for the groups of a whole bank. The host waits if the collective makes it.

    A group of learners that share gradients and have no finite one does not step: its gate, which lets only finite
    values pass, becomes 0 / 0.
    """
    tasks = groups[0].tasks
    mean = tasks.gradient_mean
    assert mean is not None, "called only if gradients are averaged"
    of = {learner: results for group in groups for learner, results in group.results().items()}
    for learner, results in of.items():  # gradients that are not finite, or whose loss is not, become zero
        own = OneLearner(learner, tasks.bank.trained_row(learner))
        opened = torch.isfinite(own.gradient_norms()) & torch.isfinite(results[LOSS])
        keep_bits(own.row.gradients, opened)
        results[FINITE].copy_(opened)
    for sharing in tasks.bank.gradient_groups if mean.group_size is not None else ():
        some = torch.stack([of[learner][FINITE] for learner in sharing]).amax()
        for learner in sharing:
            of[learner][STEPPED].copy_(some / some)
    tasks.bank.average_gradients(mean, tasks.collective)


def compare_gradients(groups: Sequence[GroupTasks]) -> None:
    """Do as `RoundTasks.compare_gradients`, for the groups of a whole bank."""
    bank = groups[0].tasks.bank
    lists = [bank.gradients.trained(learner) for learner in range(bank.num_learners)]
    total = [own.clone() for own in lists[0]]
    for other in lists[1:]:
        torch._foreach_add_(total, other)
    _write_comparison(lists, total, groups[0].results()[0])


def _write_comparison(gradients: Sequence[list[Tensor]], total: list[Tensor], results: Tensor) -> None:
    """Write the comparison of gradients, given their sum, to the first learner's results `[NUM_RESULTS]`."""
    squares = [torch.stack(torch._foreach_norm(own)).double().square().sum() for own in (*gradients, total)]
    results[MEAN_SQUARE].copy_(torch.stack(squares[:-1]).mean())
    results[SQUARE_OF_MEAN].copy_(squares[-1] / len(gradients) ** 2)


def _gathered(feed: Feed) -> ResidentFeed | None:
    """Return the feed if `learn`, and so a graph of it, can gather its batches. Mixing draws on the host."""
    return feed if isinstance(feed, ResidentFeed) and feed.mixing is None else None


class LearnerTasks(GroupTasks):
    """Bodies for one learner, on a stream of its own; `learn` gathers its batch where the data are on the device."""

    def __init__(self, tasks: RoundTasks, learner: int) -> None:
        super().__init__(tasks, "streams", range(learner, learner + 1))
        self._row = OneLearner(learner, tasks.bank.trained_row(learner))
        self._feed = _gathered(tasks.feed)
        if self._feed is not None:
            self._picks, self._batch = self._feed.new_picks(1), self._feed.new_batches(1).map(itemgetter(0))

    @property
    def _draws(self) -> bool:
        return self.tasks.bank.has_dropout

    def _load_batch(self, plan: Round) -> None:
        start = plan.starts[self.learners.start]
        if self._feed is None:
            self._keep(self.tasks.feed.batch(start))
        else:
            self._feed.write_picks([start], self._picks)

    def learn(self, shared: bool, masks_ahead: bool) -> None:
        tasks, bank, batch, (learner,) = self.tasks, self.tasks.bank, self._batch, self.learners
        assert batch is not None, "a learning task needs a loaded batch"
        if self._feed is not None:
            self._feed.take(self._picks, batch)
        with self._tapes[shared].over(masks_ahead):
            output, targets = tasks.read(call(tasks.model(learner), batch.inputs), batch.targets)
        loss = tasks.loss_of(learner, output, targets)
        gradients = torch.autograd.grad(loss, bank.trained_parameters(learner), allow_unused=True)
        if any(gradient is None for gradient in gradients):
            tasks.tell_missing_gradients(gradients)
        bank.store_gradients(learner, gradients)
        self._results[0, LOSS].copy_(loss.detach().reshape(()))
        right = correct_of_batch(detached(output), targets, tasks.ignored, batch.size)
        self._classifies = right is not None
        if right is not None:
            self._results[0, NUM_CORRECT].copy_(right)

    def correct(self, averaging: LinearRound | None) -> None:
        results = self._results[0]
        self.update.correct(
            self._row,
            averaging,
            loss=results[self._loss_gate],
            learning_rate=self._rates[0],
            step_count=self._counts[0],
            finite=results[self._gate],
        )


class FusedTasks(GroupTasks):
    """Bodies for several learners at once, over a bank in `blocks`.

    Args:
        tasks: what to compute.
        fused: the forward and backward pass of the learners.
        update: corrections by kernels, or None for operators, which must have all learners of the bank. Learners in one
            row take one.
        gathers: whether `learn` gathers the batch from the feed's picks, where it can.
    """

    def __init__(self, tasks: RoundTasks, fused: FusedPass, update: KernelUpdate | None, gathers: bool) -> None:
        super().__init__(tasks, "fused", fused.learners)
        self._pass, self._kernels, self.notes = fused, update, fused.notes
        self._rows: OneLearner | AllLearners | None = None
        if update is None and tasks.bank.one_row:
            self._rows = OneLearner(0, tasks.summed_rows[0])
        elif update is None:
            self._rows = AllLearners(tasks.bank, tasks.update.optimizer)
        self._feed = _gathered(tasks.feed) if gathers else None
        # If `learn` gathers: static picks and the gathered batch, for one or K batches.
        self._picked: dict[int, tuple[Tensor, Batch]] = {}

    @property
    def has_kernels(self) -> bool:
        """True if corrections run as kernels."""
        return self._kernels is not None

    @property
    def _draws(self) -> bool:
        return self._pass.graph.draws

    def _load_batch(self, plan: Round) -> None:
        if self._feed is None:
            self._keep(self._pass.batch(plan))
            return
        starts = self._pass.starts(plan)
        if len(starts) not in self._picked:  # made at first use, which is never during a capture
            order: MemoryOrder = "channels" if self._pass.graph.takes_channels and len(starts) > 1 else "stacked"
            self._picked[len(starts)] = self._feed.new_picks(len(starts)), self._feed.new_batches(len(starts), order)
        self._feed.write_picks(starts, self._picked[len(starts)][0])

    def shares(self, plan: Round) -> bool:
        return self._pass.shares(plan)

    def learn(self, shared: bool, masks_ahead: bool, apart: bool = False) -> None:
        """See `GroupTasks.learn`. Of learners in one row the sum of gradients goes to `bank.total`.

        If these are taken `apart`, they are also compared.
        """
        results, k, batch = self._results, len(self.learners), self._batch
        with self._tapes[shared].over(masks_ahead), self._pass.graph.rows_apart() if apart else nullcontext():
            if self._feed is not None:
                picks, batch = self._picked[1 if shared else k]
                self._feed.take(picks, batch)
                batch = batch.map(itemgetter(0)) if shared else batch
            assert batch is not None, "a round needs a loaded batch"
            learned = self._pass.learn(batch, shared)
        self._store(learned.gradients, apart)
        results[:k, LOSS].copy_(learned.losses)
        self._classifies = learned.num_correct is not None
        if learned.num_correct is not None:
            results[:k, NUM_CORRECT].copy_(learned.num_correct)

    def _store(self, gradients: Sequence[Tensor | None], apart: bool) -> None:
        """Write gradients to the bank: those of each learner, or of learners in one row their sum."""
        bank = self.tasks.bank
        if not bank.one_row:
            bank.store_stacked_gradients(gradients, self.learners)
            return
        if apart:
            each = [None if own is None else own.to(bank.precision.master) for own in gradients]
            gradients = [None if own is None else own.sum(0) for own in each]
            given, total = ([own for own in found if own is not None] for found in (each, gradients))
            _write_comparison([[own[j] for own in given] for j in self.learners], total, self._results[0])
        copy_present(bank.summed_gradients, gradients)

    def average_sum(self) -> None:
        """Make the sum in `bank.total` the mean over all devices' learners. The host waits if the collective makes it.

        If a loss or the sum is not finite, the mean is NaN on all devices, so that no learner steps. The cause are the
        learners whose loss is not finite; if only their sum is not, the first one stands for those that nobody knows.
        """
        bank, results = self.tasks.bank, self._results[: len(self.learners)]
        total, own = bank.total.trained(), torch.isfinite(results[:, LOSS])
        sums, losses = torch.isfinite(torch.stack(torch._foreach_norm(total))).all(), own.all()
        results[:, FINITE].copy_(own)
        results[:1, FINITE].mul_(sums | ~losses)
        kept = losses.to(bank.precision.master)
        torch._foreach_mul_(total, kept / kept / bank.total_learners)
        self.tasks.collective.all_reduce_sum(bank.total.storage)

    def correct(self, averaging: LinearRound | None) -> None:
        results, one_row = self._results, self.tasks.bank.one_row
        if self._kernels is not None:
            self._kernels.correct(
                averaging, results=results, loss_column=self._loss_gate, finite_column=self._gate,
                learning_rates=self._rates, step_counts=self._counts,
            )  # fmt: skip
        else:
            assert self._rows is not None, "operators need all rows end to end"
            own = 0 if one_row else slice(None)
            self.update.correct(
                self._rows,
                averaging,
                loss=results[own, self._loss_gate],
                learning_rate=self._rates[own],
                step_count=self._counts[own],
                finite=results[own, self._gate],
            )
        if one_row:  # all took the first one's step
            for values in (self._counts, results[:, self._gate]):
                values[1:].copy_(values[0])

    @property
    def moves_z(self) -> bool:
        """True if `correct` also moves z, so that `average` has nothing to do."""
        return self._kernels is not None and self._kernels.moves

    def average(self, outcome: RoundOutcome) -> None:
        """Move z, by the sum of corrections that kernels have left or by `RoundTasks.average`, unless `moves_z`."""
        if self._kernels is None:
            self.tasks.average(outcome)
        elif not self._kernels.moves:
            self.tasks.move(outcome, self._kernels.move)
