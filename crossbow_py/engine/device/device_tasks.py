"""Task bodies that a CUDA graph can hold: they never block the host, and read and write tensors with fixed addresses.

They compute what `RoundTasks` computes. The host hands over a round with `load` (batch, learning rate, dropout masks),
outside any graph; the bodies then read only static tensors; `report` copies their results to the host, which reads them
with `read` once the stream has passed. `DeviceTasks` runs each learner by itself; `fused_device_tasks.py` has the
bodies that run several in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch
from crossbow_py.engine.modules.dropout import MaskTape
from crossbow_py.engine.modules.losses import correct_of_batch
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.device_update import DeviceUpdate, OneLearner, keep_bits

NUM_RESULTS = 4  # of a learner in a round
LOSS, NUM_CORRECT, FINITE, STEPPED = range(NUM_RESULTS)


class RoundValues:
    """The inputs and results of rounds on the device: K learners, and one more entry that belongs to no learner.

    Bodies enqueue work on the current stream, record no events, and leave the order to the executor.

    Args:
        tasks: what to compute.
        executor: its name, for messages.
        learners: K neighbouring learners; by default all.

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
        # Learners that share a gradient step if it is finite and their group is kept (`average_gated`); their own
        # losses do not count here, as `gate_gradients` has checked them.
        shares = tasks.gradient_mean is not None
        self._loss_gate, self._gate = (STEPPED, STEPPED) if shares else (LOSS, FINITE)

    def _keep(self, static: Batch | None, batch: Batch) -> Batch:
        """Copy the batch to static tensors, which the first one makes. Raises UserError if shape or dtype differ."""
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
        """Do as `RoundTasks.average`, which does not block the host."""
        self.tasks.average(outcome)

    def average_gradients(self) -> None:
        """Do as `RoundTasks.average_gradients`; see `average_gated`."""
        average_gated(self.tasks, [self])

    def results(self) -> dict[int, Tensor]:
        """Return each learner's results of a round, views `[NUM_RESULTS]`."""
        return dict(zip(self.learners, self._results, strict=False))

    def read(self, outcome: RoundOutcome, host: Tensor) -> None:
        """Fill the outcome from `host` [K, 4] and count the steps in the bank. The host must have waited for `host`."""
        for row, learner in enumerate(self.learners):
            values = host[learner].tolist()
            outcome.losses[learner] = values[LOSS]
            outcome.num_correct[learner] = values[NUM_CORRECT] if self._classifies[row] else None
            stepped = values[self._gate] == 1
            outcome.finite[learner] = stepped and values[FINITE] == 1
            self.tasks.bank.step_counts[learner] += stepped

    def count_steps(self) -> None:
        """Copy the step counts from the device to the bank. The host must have waited for all rounds."""
        bank = self.tasks.bank
        counts = self._counts[: len(self.learners)].tolist()  # host–device synchronisation
        bank.step_counts[self.learners.start : self.learners.stop] = [int(count) for count in counts]


def average_gated(tasks: RoundTasks, values: Sequence[RoundValues]) -> None:
    """See `RoundTasks.average_gradients`. The host waits only if the collective makes it.

    A group without a finite learner does not step: its gate, which lets only finite values pass, becomes 0 / 0.

    Args:
        tasks: of the bank.
        values: those of all its learners.
    """
    mean = tasks.gradient_mean
    assert mean is not None, "called only if gradients are averaged"
    of = {learner: results for each in values for learner, results in each.results().items()}
    for learner, results in of.items():  # gradients that are not finite, or whose loss is not, become zero
        own = OneLearner(learner, tasks.bank.trained_row(learner))
        opened = torch.isfinite(own.gradient_norms()) & torch.isfinite(results[LOSS])
        keep_bits(own.row.gradients, opened)
        results[FINITE].copy_(opened)
    for group in tasks.bank.gradient_groups if mean.group_size is not None else ():
        some = torch.stack([of[learner][FINITE] for learner in group]).amax()
        for learner in group:
            of[learner][STEPPED].copy_(some / some)
    tasks.bank.average_gradients(mean, tasks.collective)


class DeviceTasks(RoundValues):
    """Bodies for one learner each, on a stream of its own; `average` comes after every learner's `correct`."""

    def __init__(self, tasks: RoundTasks) -> None:
        super().__init__(tasks, executor="streams")
        learners = range(tasks.bank.num_learners)
        self.notes: list[str] = []
        self._rows = [OneLearner(learner, tasks.bank.trained_row(learner)) for learner in learners]
        self._batches: list[Batch | None] = [None for _ in learners]
        self._loaded_rates: list[float | None] = [None for _ in learners]
        self._tapes = [MaskTape() for _ in learners]

    def variant(self, learner: int, plan: Round) -> None:
        """Return what `learn` is captured separately for: nothing."""

    def load(self, learner: int, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """Hand a round to a learner: its batch, dropout masks, and the learning rate and step count if they changed.

        The batch is gathered and then copied to the static tensors that the graph reads. The host waits only if the
        feed makes it.

        Args:
            learner: the learner.
            plan: the plan of the round.
            bank_changed: whether the caller had the bank since the last round, so that step counts are read from it.
            masks_ahead: whether to draw dropout masks now, as many as an earlier pass did, because `learn` will be
                captured or replayed.

        Raises:
            UserError: the batch has another shape or dtype than earlier ones.
        """
        bank, rate = self.tasks.bank, plan.learning_rates[learner]
        if bank.has_dropout:
            self.tasks.seed_dropout(learner, plan)
            if masks_ahead:
                self._tapes[learner].draw()
        if bank_changed:
            self._counts[learner].fill_(bank.step_counts[learner])
        if rate != self._loaded_rates[learner]:
            self._rates[learner].fill_(rate)
            self._loaded_rates[learner] = rate
        self._batches[learner] = self._keep(self._batches[learner], self.tasks.feed.batch(plan.starts[learner]))

    def learn(self, learner: int, plan: Round, masks_ahead: bool) -> None:
        """Write the gradient of the learner's loss on its loaded batch to G_j, at w_j.

        The loss and the right predictions go to the results. `masks_ahead` is that of `load`.
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
        """Copy the learner's results to row `learner` of `host` [K, 4], pinned memory on CUDA, without blocking."""
        host[learner].copy_(self._results[learner], non_blocking=True)
