"""Task bodies that never make the host wait, over tensors that stay where they are: what a CUDA graph can hold.

They compute what `RoundTasks` computes. The host hands a round over with `load` (batch, learning rate, dropout masks),
outside any graph; the bodies then read static tensors alone; `report` sends what they found to the host, which reads it
with `read` once the stream is past it. `DeviceTasks` goes learner by learner, `FusedDeviceTasks` does all in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.data.feed import Batch
from crossbow_py.data.inputs import MemoryOrder
from crossbow_py.engine.device_update import AllLearners, DeviceUpdate, OneLearner
from crossbow_py.engine.dropout import MaskTape, counter_seed
from crossbow_py.engine.fused_pass import FusedPass, is_shared
from crossbow_py.engine.kernel_update import KernelUpdate, choose_kernel_update
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.errors import UserError

NUM_RESULTS = 3  # of a learner in a round
_LOSS, _NUM_CORRECT, _FINITE = range(NUM_RESULTS)


class RoundValues:
    """What goes into rounds and comes out of them, K learners and one entry for values that are nobody's.

    Bodies enqueue on the stream that is current, record nothing, and leave the order to the executor.

    Args:
        tasks: what to compute.
        executor: the name for messages.

    Raises UserError for an optimizer without a device update.
    """

    def __init__(self, tasks: RoundTasks, executor: str) -> None:
        bank, entries = tasks.bank, tasks.bank.num_learners + 1
        self.tasks, self._executor = tasks, executor
        self.update = DeviceUpdate(tasks.update.optimizer, tasks.update.rule, bank.device)
        self._rates, self._counts = (torch.zeros(entries, dtype=torch.float64, device=bank.device) for _ in range(2))
        self._results = torch.zeros(entries, NUM_RESULTS, dtype=torch.float64, device=bank.device)
        self._classifies = [False] * bank.num_learners

    def _seed(self, learner: int, plan: Round) -> None:
        seed = counter_seed(self.tasks.seed, "dropout", plan.index, learner)
        self.tasks.bank.generators[learner].manual_seed(seed)

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

    def read(self, outcome: RoundOutcome, host: Tensor) -> None:
        """Fill the outcome from `host` [K, 3], and count the steps in the bank. The host must have waited for it."""
        for learner, values in enumerate(host.tolist()):
            outcome.losses[learner] = values[_LOSS]
            outcome.num_correct[learner] = values[_NUM_CORRECT] if self._classifies[learner] else None
            outcome.finite[learner] = values[_FINITE] == 1
            self.tasks.bank.step_counts[learner] += outcome.finite[learner]

    def count_steps(self) -> None:
        """Take the bank's step counts from the device. The host must have waited for all rounds."""
        bank = self.tasks.bank
        counts = self._counts[: bank.num_learners].tolist()  # host–device synchronisation
        bank.step_counts[: bank.num_learners] = [int(count) for count in counts]


class DeviceTasks(RoundValues):
    """Bodies for one learner each: on a stream a learner, `average` after every learner's `correct`."""

    def __init__(self, tasks: RoundTasks, executor: str = "streams") -> None:
        super().__init__(tasks, executor)
        learners = range(tasks.bank.num_learners)
        self._rows = [OneLearner(learner, tasks.bank.trained_row(learner)) for learner in learners]
        self._batches: list[Batch | None] = [None for _ in learners]
        self._loaded_rates: list[float | None] = [None for _ in learners]
        self._tapes = [MaskTape() for _ in learners]

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

    def learn(self, learner: int, masks_ahead: bool) -> None:
        """G_j ← gradient of the learner's loss on its loaded batch, at w_j; loss and correct predictions beside it.

        `masks_ahead` as `load` was told.
        """
        bank, batch, results = self.tasks.bank, self._batches[learner], self._results[learner]
        assert batch is not None, "a learning task needs a loaded batch"
        with self._tapes[learner].over(masks_ahead):
            output = bank.module(learner)(batch.inputs).to(bank.precision.master)
        loss = self.tasks.loss(output, batch.targets)
        gradients = torch.autograd.grad(loss, bank.trained_parameters(learner), allow_unused=True)
        bank.store_gradients(learner, gradients)
        results[_LOSS].copy_(loss.detach().reshape(()))
        right = correct_predictions(output.detach(), batch.targets)
        self._classifies[learner] = right is not None
        if right is not None:
            results[_NUM_CORRECT].copy_(right)

    def correct(self, learner: int, averaging: LinearRound | None) -> None:
        """See `DeviceUpdate.correct`."""
        results = self._results[learner]
        self.update.correct(
            self._rows[learner],
            averaging,
            loss=results[_LOSS],
            learning_rate=self._rates[learner],
            step_count=self._counts[learner],
            finite=results[_FINITE],
        )

    def report(self, learner: int, host: Tensor) -> None:
        """Copy the learner's results to row `learner` of `host` [K, 3], pinned memory on CUDA; the host goes on."""
        host[learner].copy_(self._results[learner], non_blocking=True)


class FusedDeviceTasks(RoundValues):
    """Bodies for all learners at once, over a bank in `blocks`; one stream for all of them.

    Args:
        tasks: what to compute.
        fused: forward and backward of all learners.
        kernels: whether the update is to be Triton kernels where they serve, and not operators.
        executor: the name for messages.

    Attributes:
        notes: sentences for the user, on what runs slower than it might.
    """

    def __init__(self, tasks: RoundTasks, fused: FusedPass, kernels: bool, executor: str = "fused") -> None:
        super().__init__(tasks, executor)
        self._pass, self.notes = fused, list[str]()
        self._kernels: KernelUpdate | None = None
        if kernels:
            optimizer, rule = tasks.update.optimizer, tasks.update.rule
            alone = tasks.collective.num_devices == 1
            self._kernels, note = choose_kernel_update(tasks.bank, optimizer, rule, moves=alone)
            self.notes += [note] if note else []
        self._rows = None if self._kernels else AllLearners(tasks.bank, tasks.update.optimizer)
        self._batch: Batch | None = None
        # Where the gather is in the graph: what is picked, and the batch that becomes of it, for one or K batches.
        self._picked: dict[int, tuple[Tensor, Batch]] = {}
        self._picks = kernels and tasks.feed.supports_picks
        self._loaded_rates: tuple[float, ...] = ()
        self._tape = MaskTape()

    def load(self, plan: Round, bank_changed: bool, masks_ahead: bool) -> None:
        """As `DeviceTasks.load`, for every learner."""
        bank, learners = self.tasks.bank, range(self.tasks.bank.num_learners)
        if bank.has_dropout:
            for learner in learners:
                self._seed(learner, plan)
            if masks_ahead:
                self._tape.draw()
        if bank_changed:
            for learner in learners:
                self._counts[learner].fill_(bank.step_counts[learner])
        if plan.learning_rates != self._loaded_rates:
            self._load_rates(plan.learning_rates)
        if self._picks:
            starts = plan.starts[:1] if is_shared(plan) else plan.starts
            self.tasks.feed.write_picks(starts, self._picked_for(len(starts))[0])
        else:
            self._batch = self._keep(self._batch, self._pass.batch(plan))

    def _picked_for(self, num_batches: int) -> tuple[Tensor, Batch]:
        """Made when first needed, which is never in a capture."""
        if num_batches not in self._picked:
            feed, channels = self.tasks.feed, self._pass.graph.takes_channels and num_batches > 1
            order: MemoryOrder = "channels" if channels else "stacked"
            self._picked[num_batches] = feed.new_picks(num_batches), feed.new_batches(num_batches, order)
        return self._picked[num_batches]

    def _loaded(self, shared: bool) -> Batch:
        """The round's batches, gathered now if that is left to the graph."""
        if not self._picks:
            assert self._batch is not None, "a round needs a loaded batch"
            return self._batch
        picks, batch = self._picked[1 if shared else self.tasks.bank.num_learners]
        self.tasks.feed.take(picks, batch)
        return Batch(*(each[0] for each in batch)) if shared else batch

    def _load_rates(self, rates: tuple[float, ...]) -> None:
        if len(set(rates)) == 1:
            self._rates.fill_(rates[0])
        else:
            for learner, rate in enumerate(rates):
                self._rates[learner].fill_(rate)
        self._loaded_rates = rates

    def learn_and_correct(self, averaging: LinearRound | None, shared: bool, masks_ahead: bool) -> None:
        """All learning and correction tasks of a round, on the loaded batch, which learners may share."""
        bank, results = self.tasks.bank, self._results
        with self._tape.over(masks_ahead):
            learned = self._pass.learn(self._loaded(shared), shared)
        bank.store_stacked_gradients(learned.gradients)
        results[: bank.num_learners, _LOSS].copy_(learned.losses)
        if learned.num_correct is not None:
            results[: bank.num_learners, _NUM_CORRECT].copy_(learned.num_correct)
        self._classifies = [learned.num_correct is not None] * bank.num_learners
        self._correct(averaging)

    def _correct(self, averaging: LinearRound | None) -> None:
        if self._kernels is not None:
            self._kernels.correct(
                averaging, results=self._results, loss_column=_LOSS, finite_column=_FINITE,
                learning_rates=self._rates, step_counts=self._counts,
            )  # fmt: skip
            return
        assert self._rows is not None, "without kernels there are vectors for the operators"
        results = self._results
        self.update.correct(
            self._rows,
            averaging,
            loss=results[:, _LOSS],
            learning_rate=self._rates,
            step_count=self._counts,
            finite=results[:, _FINITE],
        )

    @property
    def moves_z(self) -> bool:
        """Whether `learn_and_correct` moves z as well, and `average` has nothing to do."""
        return self._kernels is not None and self._kernels.moves

    def average(self, outcome: RoundOutcome) -> None:
        """Move z, where `moves_z` does not hold; the kernels have summed the corrections already."""
        averaging = outcome.plan.averaging
        if self._kernels is None:
            super().average(outcome)
        elif not self._kernels.moves and averaging is not None:
            self.tasks.collective.all_reduce_sum(self.tasks.bank.total.storage)
            self._kernels.move(averaging)

    def report(self, host: Tensor) -> None:
        """Copy the results to `host` [K, 3], pinned memory on CUDA; the host goes on."""
        host.copy_(self._results[: self.tasks.bank.num_learners], non_blocking=True)


def correct_predictions(output: Tensor, targets: Tensor) -> Tensor | None:
    """As `rounds.count_correct`, 0-dim on the device; None where the task is not classification."""
    if output.ndim != 2 or targets.ndim != 1 or targets.is_floating_point():
        return None
    return (output.argmax(1) == targets).sum()
