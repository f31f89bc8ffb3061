"""Task bodies that never make the host wait, over tensors that stay where they are: what a CUDA graph can hold.

They compute what `RoundTasks` computes. The host hands a round over with `load` (batch, learning rate, dropout masks),
outside any graph; the bodies then read static tensors alone; `report` sends what they found to the host, which reads it
with `read` once the stream is past it. `DeviceTasks` goes learner by learner; `fused_device_tasks.py` has those that do
several in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch
from crossbow_py.engine.modules.dropout import MaskTape
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks, correct_of_batch
from crossbow_py.engine.update.device_update import DeviceUpdate, OneLearner, keep_bits

NUM_RESULTS = 4  # of a learner in a round
LOSS, NUM_CORRECT, FINITE, STEPPED = range(NUM_RESULTS)


class RoundValues:
    """What goes into rounds and comes out of them, K learners and one entry for values that are nobody's.

    Bodies enqueue on the stream that is current, record nothing, and leave the order to the executor.

    Args:
        tasks: what to compute.
        executor: the name for messages.
        learners: K neighbouring ones; by default all.

    Raises UserError for an optimizer without a device update.
    """

    def __init__(self, tasks: RoundTasks, executor: str, learners: range | None = None) -> None:
        self.learners = range(tasks.bank.num_learners) if learners is None else learners
        bank, entries = tasks.bank, len(self.learners) + 1
        self.tasks, self._executor = tasks, executor
        self.update = DeviceUpdate(tasks.update.optimizer, tasks.update.rule, bank.device)
        self._rates, self._counts = (torch.zeros(entries, dtype=torch.float64, device=bank.device) for _ in range(2))
        self._results = torch.zeros(entries, NUM_RESULTS, dtype=torch.float64, device=bank.device)
        self._classifies = [False] * len(self.learners)
        # Who shares a gradient steps by its norm, and if its group is kept (`average_gated`): the learner's own loss
        # does not count, and has been looked at.
        shares = tasks.gradient_mean is not None
        self._loss_gate, self._gate = (STEPPED, STEPPED) if shares else (LOSS, FINITE)

    def _seed(self, learner: int, plan: Round) -> None:
        self.tasks.seed_dropout(learner, plan)

    def _keep(self, static: Batch | None, batch: Batch) -> Batch:
        """The batch where a graph reads it: in tensors like those of the first one. Raises UserError for another."""
        static = static or Batch(torch.empty_like(batch.inputs), torch.empty_like(batch.targets))
        for kept, given in zip(static, batch, strict=True):
            if (kept.shape, kept.dtype) != (given.shape, given.dtype):
                raise UserError(
                    f"executor={self._executor} needs batches of one shape, got {list(given.shape)} of {given.dtype} "
                    f"after {list(kept.shape)} of {kept.dtype}; set executor=serial."
                )
            kept.copy_(given)
        return static

    def average(self, outcome: RoundOutcome) -> None:
        """See `RoundTasks.average`, which does not make the host wait."""
        self.tasks.average(outcome)

    def gate_gradients(self) -> None:
        """Before gradients are averaged: those that are not finite, or whose loss is not, become zero."""
        for row, learner in enumerate(self.learners):
            own, results = OneLearner(learner, self.tasks.bank.trained_row(learner)), self._results[row]
            opened = torch.isfinite(own.gradient_norms()) & torch.isfinite(results[LOSS])
            keep_bits(own.row.gradients, opened)
            results[FINITE].copy_(opened)

    def average_gradients(self) -> None:
        """See `average_gated`."""
        average_gated(self.tasks, [self])

    def results_of(self, learner: int) -> Tensor:
        """What a round leaves of the learner, `[NUM_RESULTS]`: a view."""
        return self._results[self.learners.index(learner)]

    def read(self, outcome: RoundOutcome, host: Tensor) -> None:
        """Fill the outcome from `host` [K, 4], and count the steps in the bank. The host must have waited for it."""
        for row, learner in enumerate(self.learners):
            values = host[learner].tolist()
            outcome.losses[learner] = values[LOSS]
            outcome.num_correct[learner] = values[NUM_CORRECT] if self._classifies[row] else None
            stepped = values[self._gate] == 1
            outcome.finite[learner] = stepped and values[FINITE] == 1
            self.tasks.bank.step_counts[learner] += stepped

    def count_steps(self) -> None:
        """Take the bank's step counts from the device. The host must have waited for all rounds."""
        bank = self.tasks.bank
        counts = self._counts[: len(self.learners)].tolist()  # host–device synchronisation
        bank.step_counts[self.learners.start : self.learners.stop] = [int(count) for count in counts]


def average_gated(tasks: RoundTasks, parts: Sequence[RoundValues]) -> None:
    """See `RoundTasks.average_gradients`; `parts` have the learners. The host waits only where the collective makes it.

    A group of which nobody is finite will not step: its gate, which tells finite values from others, is then 0 / 0.
    """
    mean = tasks.gradient_mean
    assert mean is not None, "asked for where gradients are averaged"
    for part in parts:
        part.gate_gradients()
    of = {learner: part.results_of(learner) for part in parts for learner in part.learners}
    for group in tasks.bank.gradient_groups if mean.group_size is not None else ():
        some = torch.stack([of[learner][FINITE] for learner in group]).amax()
        for learner in group:
            of[learner][STEPPED].copy_(some / some)
    tasks.bank.average_gradients(mean, tasks.collective)


class DeviceTasks(RoundValues):
    """Bodies for one learner each: on a stream a learner, `average` after every learner's `correct`."""

    def __init__(self, tasks: RoundTasks) -> None:
        super().__init__(tasks, executor="streams")
        learners = range(tasks.bank.num_learners)
        self.notes: list[str] = []
        self._rows = [OneLearner(learner, tasks.bank.trained_row(learner)) for learner in learners]
        self._batches: list[Batch | None] = [None for _ in learners]
        self._loaded_rates: list[float | None] = [None for _ in learners]
        self._tapes = [MaskTape() for _ in learners]

    def variant(self, learner: int, plan: Round) -> None:
        """What makes for another graph of `learn`: nothing."""

    def load(self, learner: int, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """Hand a round to a learner: its batch, dropout masks, and what has changed of learning rate and step count.

        The batch is gathered and then copied to where the graph reads it. Whether the host waits is the feed's doing.

        Args:
            learner: whose.
            plan: the round.
            bank_changed: whether others had the bank since the last round, so that its step counts are to be taken.
            masks_ahead: draw the masks that an earlier pass took of dropout, for one that is captured or replayed.

        Raises:
            UserError: the batch has another shape or dtype than the one before.
        """
        bank, rate = self.tasks.bank, plan.learning_rates[learner]
        if bank.has_dropout:
            self._seed(learner, plan)
            if masks_ahead:
                self._tapes[learner].draw()
        if bank_changed:
            self._counts[learner].fill_(bank.step_counts[learner])
        if rate != self._loaded_rates[learner]:
            self._rates[learner].fill_(rate)
            self._loaded_rates[learner] = rate
        self._batches[learner] = self._keep(self._batches[learner], self.tasks.feed.batch(plan.starts[learner]))

    def learn(self, learner: int, plan: Round, masks_ahead: bool) -> None:
        """G_j ← gradient of the learner's loss on its loaded batch, at w_j; loss and correct predictions beside it.

        `masks_ahead` as `load` was told.
        """
        bank, batch, results = self.tasks.bank, self._batches[learner], self._results[learner]
        assert batch is not None, "a learning task needs a loaded batch"
        with self._tapes[learner].over(masks_ahead):
            output = self.tasks.model(learner)(batch.inputs).to(bank.precision.master)
        loss = self.tasks.loss_of(learner, output, batch.targets)
        gradients = torch.autograd.grad(loss, bank.trained_parameters(learner), allow_unused=True)
        if any(gradient is None for gradient in gradients):
            self.tasks.tell_missing_gradients(gradients)
        bank.store_gradients(learner, gradients)
        results[LOSS].copy_(loss.detach().reshape(()))
        right = correct_of_batch(output.detach(), batch.targets, self.tasks.ignored)
        self._classifies[learner] = right is not None
        if right is not None:
            results[NUM_CORRECT].copy_(right)

    def correct(self, learner: int, averaging: LinearRound | None) -> None:
        """See `DeviceUpdate.correct`."""
        results = self._results[learner]
        self.update.correct(
            self._rows[learner],
            averaging,
            loss=results[self._loss_gate],
            learning_rate=self._rates[learner],
            step_count=self._counts[learner],
            finite=results[self._gate],
        )

    def report(self, learner: int, host: Tensor) -> None:
        """Copy the learner's results to row `learner` of `host` [K, 4], pinned memory on CUDA; the host goes on."""
        host[learner].copy_(self._results[learner], non_blocking=True)
