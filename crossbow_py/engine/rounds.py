"""What one round computes: the bodies of its tasks, and the values that go in and come out.

Every executor runs these bodies; it only decides when and where. A body touches its own learner's row, so bodies of
different learners may run at the same time; the executor orders corrections and averaging around z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import GradientMean, LinearRound, OuterStep, RoundAveraging
from crossbow_py.data.datasets import counted
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.gradient_mean import average_gradients
from crossbow_py.engine.bank.layout import TrainedRow
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.compiled import CompiledModels, Model
from crossbow_py.engine.modules.dropout import OwnDraws, counter_seed
from crossbow_py.engine.modules.label_smoothing import IGNORED, smoothed_cross_entropy
from crossbow_py.engine.tasks import AveragingTask, CorrectionTask, GradientMeanTask, LearningTask, Task
from crossbow_py.engine.update.row_update import Step, TorchUpdate

Loss = Callable[[Tensor, Tensor], Tensor]
_DRAWS_LATE = (
    "The model has begun to draw random numbers, after rounds without any: those of its first round with some came "
    "from torch's own generator, and will not repeat."
)
_MOST_FALSE_ALARMS = 3


class Draws(NamedTuple):
    """What a learner alone in a run with this seed draws in this round of it."""

    seed: int
    round_index: int


def taken(notes: list[str]) -> list[str]:
    """Return what a list holds and take it out, one by one: another thread may add to it meanwhile."""
    found = []
    while notes:
        found.append(notes.pop(0))
    return found


@dataclass(frozen=True)
class Round:
    """One round's plan.

    Attributes:
        index: from 0 over the whole run.
        starts: position in the sample stream of each learner's batch.
        learning_rates: γ of each learner.
        together: what is averaged in this round and how, or None.
        joins_nodes: whether nodes that average for themselves average z between them in this round.
        draws: where each learner's dropout draws from, when learners are not of one run; else none.
    """

    index: int
    starts: tuple[int, ...]
    learning_rates: tuple[float, ...]
    together: RoundAveraging | None
    joins_nodes: bool = False
    draws: tuple[Draws, ...] = ()

    @property
    def averaging(self) -> LinearRound | None:
        """Coefficients of corrections and averaging, where learners are pulled towards z as they step."""
        return self.together if isinstance(self.together, LinearRound) else None

    @property
    def outer_step(self) -> OuterStep | None:
        """What follows once the round is over and nothing is in flight; executors have no part in it."""
        return self.together if isinstance(self.together, OuterStep) else None


@dataclass
class RoundOutcome:
    """What a round's tasks leave behind, one entry a learner. Whole once the round's last task is over.

    `num_correct` is that of `correct_of_batch`, None where the task is not classification. `gradient_norm` is that of
    the sum of gradients in `bank.total`, where all learners step by it.
    """

    plan: Round
    losses: list[float] = field(init=False)
    num_correct: list[float | None] = field(init=False)
    finite: list[bool] = field(init=False)
    gradient_norm: float = math.nan

    def __post_init__(self) -> None:
        learners = len(self.plan.starts)
        self.losses, self.num_correct = [math.nan] * learners, [None] * learners
        self.finite = [True] * learners

    @property
    def non_finite_learners(self) -> list[int]:
        """Learners that were gated in this round."""
        return [learner for learner, finite in enumerate(self.finite) if not finite]


class RoundTasks:
    """Task bodies over one bank. Thread-safe across learners; see the module's first lines.

    Args:
        bank, update, feed, collective: what they work on and with.
        loss: of a batch, for all learners.
        seed: of dropout, where a round does not say otherwise.
        compile_model: run modules through torch.compile.
        label_smoothing: ε of every row, `[capacity]` on the bank's device; with it the loss is cross-entropy.
    """

    def __init__(
        self,
        bank: ReplicaBank,
        *,
        update: TorchUpdate,
        feed: Feed,
        loss: Loss,
        seed: int,
        collective: Collective,
        compile_model: bool = False,
        label_smoothing: Tensor | None = None,
    ) -> None:
        self._compiled = CompiledModels() if compile_model else None
        self._summed_rows: list[TrainedRow] = []
        self._without_draws: set[int] = set()  # learners whose models draw in dropout modules alone
        self._drawing: set[int] = set()  # those that are looked at again, as torch's generator has moved meanwhile
        self._false_alarms = 0
        self._has_told_missing_gradients = False
        self.notes: list[str] = []  # sentences for the user, from any thread; some come once for each learner
        self.bank, self.update, self.feed, self.loss = bank, update, feed, loss
        self.seed, self.collective, self.label_smoothing = seed, collective, label_smoothing
        left_out = ignored_target(loss)  # see there; None also where the data have no such target
        self.ignored = left_out if left_out is not None and feed.may_have_target(left_out) else None

    @property
    def gradient_mean(self) -> GradientMean | None:
        """Who averages gradients with whom, as many learners as there are; None where nobody does."""
        mean, bank = self.update.rule.gradient_mean, self.bank
        return mean if mean and mean.has_effect(bank.num_learners, self.collective.num_devices) else None

    def model(self, learner: int) -> Model:
        """What gives the learner's outputs: its module, compiled if that is asked for."""
        module = self.bank.module(learner)
        return module if self._compiled is None else self._compiled(module, learner)

    def run(self, task: Task, outcome: RoundOutcome) -> None:
        """Run one task's body in the calling thread."""
        if isinstance(task, LearningTask):
            self.learn(task.learner, outcome)
        elif isinstance(task, CorrectionTask):
            self.correct(task.learner, outcome)
        elif isinstance(task, AveragingTask):
            self.average(outcome)
        elif isinstance(task, GradientMeanTask):
            self.average_gradients(outcome)
        else:
            assert_never(task)

    def learn(self, learner: int, outcome: RoundOutcome) -> None:
        """G_j ← gradient of the learner's loss on its batch, at w_j; loss and correct predictions to the outcome."""
        bank = self.bank
        if bank.has_dropout or self._may_draw(learner):
            self.seed_dropout(learner, outcome.plan)
        batch = self.feed.batch(outcome.plan.starts[learner])
        output = self._outputs(learner, batch.inputs).to(bank.precision.master)
        loss = self.loss_of(learner, output, batch.targets)
        try:
            gradients = torch.autograd.grad(loss, bank.trained_parameters(learner), allow_unused=True)
        except RuntimeError:
            bank.check_bindings(averages=False)  # which says more, where forward has frozen a parameter
            raise
        if any(gradient is None for gradient in gradients):
            self.tell_missing_gradients(gradients)
        bank.store_gradients(learner, gradients)
        outcome.losses[learner] = loss.item()  # host–device synchronisation on CUDA
        correct = correct_of_batch(output.detach(), batch.targets, self.ignored)
        outcome.num_correct[learner] = None if correct is None else float(correct.item())  # and another

    def tell_missing_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Say what counts as zero, the first time; in the order of the layout."""
        if self._has_told_missing_gradients:
            return
        self._has_told_missing_gradients = True
        names = [name for name, own in zip(self.bank.layout.names, gradients, strict=False) if own is None]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.notes.append(
            f"No gradient came to the model's {min(names)}{more} in a round. It counts as zero: momentum and weight "
            "decay go on to move such parameters, which torch's optimizers leave alone; freeze (requires_grad=False) "
            "what is never used."
        )

    def _may_draw(self, learner: int) -> bool:
        """Whether the learner's model may draw outside dropout modules: its first pass shows it.

        On CUDA and in compiled models numbers come from torch's own generator.
        """
        return self.bank.device.type == "cpu" and self._compiled is None and learner not in self._without_draws

    def _outputs(self, learner: int, inputs: Tensor) -> Tensor:
        """The learner's outputs. All random numbers are its own."""
        if learner in self._without_draws and self._false_alarms < _MOST_FALSE_ALARMS:
            before = torch.random.get_rng_state()
            outputs = self.model(learner)(inputs)
            if not torch.equal(before, torch.random.get_rng_state()):
                self._without_draws.discard(learner)
                self._drawing.add(learner)
            return outputs
        if not self._may_draw(learner):
            return self.model(learner)(inputs)
        with OwnDraws(self.bank.generators[learner]) as draws:
            outputs = self.model(learner)(inputs)
        if learner in self._drawing:
            self._drawing.discard(learner)
            if draws.has_drawn:
                self.notes.append(_DRAWS_LATE)
            else:  # another thread has drawn: a loss, or what calls this package
                self._false_alarms += 1
        if not draws.has_drawn:
            self._without_draws.add(learner)
        return outputs

    def loss_of(self, learner: int, output: Tensor, targets: Tensor) -> Tensor:
        """The learner's own loss on a batch, a mean."""
        if self.label_smoothing is None:
            return self.loss(output, targets)
        return smoothed_cross_entropy(output, targets, self.label_smoothing[learner])

    def seed_dropout(self, learner: int, plan: Round) -> None:
        """Set the learner's generator to where the round's masks begin."""
        own = self.bank.first_learner + learner
        seed, index = plan.draws[learner] if plan.draws else (self.seed, plan.index)
        seed = counter_seed(seed, "dropout", index, 0 if plan.draws else own)
        self.bank.generators[learner].manual_seed(seed)

    def average_gradients(self, outcome: RoundOutcome) -> None:
        """G_j ← the mean of the gradients of j's group, to which those that are gated add nothing.

        Where everybody is in one group, and the update leaves gradients as they are, `bank.total` ← their sum instead.
        """
        assert self.gradient_mean is not None, "the scheduler asks for it where gradients are averaged"
        if self.summed_rows:
            rows = [self.bank.gradients.trained(learner) for learner in range(self.bank.num_learners)]
            self.sum_gradients(rows, outcome)
            return
        self.gate_gradients(outcome)
        average_gradients(self.bank, self.gradient_mean, self.collective)

    @property
    def summed_rows(self) -> list[TrainedRow]:
        """The learners' rows with the sum of all gradients in place of their own; empty where they do not share it."""
        bank = self.bank
        if not self.update.KEEPS_GRADIENTS or self.gradient_mean is None or not bank.replicas_alike:
            return []
        if len(self._summed_rows) != bank.num_learners:
            total = bank.total.trained()
            self._summed_rows = [replace(bank.trained_row(j), gradients=total) for j in range(bank.num_learners)]
        return self._summed_rows

    def sum_gradients(
        self, gradients: Sequence[list[Tensor]], outcome: RoundOutcome, store: Callable[[], None] | None = None
    ) -> None:
        """`bank.total` ← the sum of the learners' gradients, of all devices; its norm to the outcome.

        A sum that is finite is one of finite gradients; in any other, learner by learner, the gate leaves out some.
        `store` puts the gradients into the bank, where they are not there.
        """
        bank, summed = self.bank, self.summed_rows[0]
        self.update.sum(summed.gradients, gradients)
        outcome.gradient_norm = self.update.gradient_norm(summed)
        if not all(map(math.isfinite, [*outcome.losses, outcome.gradient_norm])):
            if store is not None:
                store()
            self.gate_gradients(outcome)
            self.update.sum(summed.gradients, [bank.gradients.trained(j) for j in range(bank.num_learners)])
        self.collective.all_reduce_sum(bank.total.storage)
        outcome.gradient_norm = self.update.gradient_norm(summed)

    def gate_gradients(self, outcome: RoundOutcome) -> None:
        """G_j ← 0 for learners whose loss or gradient norm is not finite."""
        for learner in range(self.bank.num_learners):
            norm = self.update.gradient_norm(self.bank.trained_row(learner))
            outcome.finite[learner] = math.isfinite(norm) and math.isfinite(outcome.losses[learner])
            if not outcome.finite[learner]:
                self.bank.gradients.zero_row(learner)

    def correct(self, learner: int, outcome: RoundOutcome) -> None:
        """C_j ← correction from the weights the gradient was taken at; then w_j ← w_j − γ·u_j − c_j.

        The gate: a learner whose loss or gradient norm is not finite keeps its row, and adds nothing to the sum. Where
        gradients are averaged its loss does not count, as the gradient is not its own; there a group keeps its rows
        when nobody in it is finite.
        """
        summed = self.summed_rows
        if summed:
            row, step = summed[learner], self.next_summed_step(learner, outcome)
        else:
            row = self.bank.trained_row(learner)
            step = self.next_step(learner, self.update.gradient_norm(row), outcome)
        if step is not None:
            self.update.correct(learner, row, outcome.plan.averaging, step)
        elif outcome.plan.averaging is not None:  # in other rounds C may still be summed
            self.bank.corrections.zero_row(learner)

    def next_step(self, learner: int, gradient_norm: float, outcome: RoundOutcome) -> Step | None:
        """The learner's gradient step, counted, its gradient clipped; None where the gate keeps it out."""
        bank, limit = self.bank, self.update.optimizer.clip_norm
        shares, finite = self.gradient_mean is not None, math.isfinite(gradient_norm)
        own = outcome.finite[learner] if shares else math.isfinite(outcome.losses[learner])
        steps = finite and (self._is_kept(learner, outcome) if shares else own)
        outcome.finite[learner] = own and finite
        if not steps:
            return None
        bank.step_counts[learner] += 1
        clips = limit is not None and gradient_norm > limit
        return Step(
            learning_rate=outcome.plan.learning_rates[learner],
            step_count=bank.step_counts[learner],
            gradient_scale=limit / (gradient_norm + 1e-6) if limit is not None and clips else 1.0,  # as in torch
        )

    def _is_kept(self, learner: int, outcome: RoundOutcome) -> bool:
        """Whether somebody of the learner's group is finite; where the group is everybody others may be, elsewhere."""
        if self.gradient_mean is None or self.gradient_mean.group_size is None:
            return True
        group = next(group for group in self.bank.gradient_groups if learner in group)
        return any(outcome.finite[other] for other in group)

    def next_summed_step(self, learner: int, outcome: RoundOutcome) -> Step | None:
        """As `next_step`, for a learner that steps by the mean of the gradients whose sum is in `bank.total`."""
        count = float(self.bank.total_learners)
        step = self.next_step(learner, outcome.gradient_norm / count, outcome)
        return step and replace(step, gradient_scale=step.gradient_scale / count)

    def average(self, outcome: RoundOutcome) -> None:
        """Sum the corrections in learner order, all-reduce, and move z. Nothing else of the bank is written."""
        bank = self.bank
        self.update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
        self.move(outcome)

    def move(self, outcome: RoundOutcome, step: Callable[[LinearRound], None] | None = None) -> None:
        """All-reduce the sum of corrections, and move z by its share; then join nodes, where the round does.

        `step` moves z by `bank.total`, where the caller has another way than the update's.
        """
        bank, coefficients = self.bank, outcome.plan.averaging
        assert coefficients is not None, "z moves in rounds that average"
        bank.total_squares = None  # `total` is written
        self.collective.all_reduce_sum(bank.total.storage)
        if coefficients.share != 1:
            bank.total.storage.mul_(coefficients.share)
        if step is None:
            self.update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], coefficients)
        else:
            step(coefficients)
        if outcome.plan.joins_nodes:
            for row in (bank.z, bank.z_prev):  # ← their means over nodes
                self.collective.mean_over_nodes(row.storage)


def is_classification(outputs: Tensor, targets: Tensor, lead: int = 0) -> bool:
    """Whether these are scores `[..., B, classes]` and classes `[..., B]`, `lead` dimensions before B.

    A single output is no class: it is the logit of one, or a number.
    """
    shaped = (outputs.ndim, targets.ndim) == (lead + 2, lead + 1) and outputs.shape[-1] > 1
    return shaped and not targets.is_floating_point()


def ignored_target(loss: Loss) -> int | None:
    """The class of targets that the loss leaves out of its mean; None where it has no such, or nobody knows."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index
    return IGNORED if loss in (nn.functional.cross_entropy, nn.functional.nll_loss) else None


def correct_predictions(outputs: Tensor, targets: Tensor, lead: int = 0, ignored: int | None = None) -> Tensor | None:
    """Right predictions of each batch, `lead` dimensions, on the device; None where the task is not classification.

    Scores whose largest is not finite predict nothing. Classes may be ruled out by a score of minus infinity. Targets
    that are `ignored` have no right prediction.
    """
    if not is_classification(outputs, targets, lead):
        return None
    largest, predicted = outputs.max(lead + 1)
    right = (predicted == targets) & largest.isfinite()
    return (right if ignored is None or ignored < 0 else right & counted(targets, ignored)).sum(lead)


def correct_of_batch(outputs: Tensor, targets: Tensor, ignored: int | None, lead: int = 0) -> Tensor | None:
    """As `correct_predictions`, by `scaled_to_batch`."""
    correct = correct_predictions(outputs, targets, lead, ignored)
    return None if correct is None else scaled_to_batch(correct, targets, ignored, lead)


def scaled_to_batch(correct: Tensor, targets: Tensor, ignored: int | None, lead: int = 0) -> Tensor:
    """correct · B / V for batches of B samples of which V are not ignored: to be divided by B, as a loss is a mean.

    On the device, and the number itself where all count.
    """
    if ignored is None:
        return correct
    return correct.double() * targets.shape[lead] / counted(targets, ignored).sum(lead).clamp(min=1)


def non_finite_outputs(outputs: Tensor, lead: int = 0) -> Tensor:
    """How many samples of outputs `[..., B, ...]` have a largest value that is not finite; `lead` dimensions.

    So minus infinity is a value like others, unless there is nothing else.
    """
    if outputs.ndim <= lead or outputs.numel() == 0 or not outputs.is_floating_point():
        return outputs.new_zeros(outputs.shape[:lead], dtype=torch.int64)
    return (~outputs.reshape(*outputs.shape[: lead + 1], -1).amax(-1).isfinite()).sum(lead)


def count_correct(output: Tensor, targets: Tensor, ignored: int | None = None) -> float | None:
    """`correct_predictions` of one batch, on the host."""
    correct = correct_predictions(output, targets, ignored=ignored)
    return None if correct is None else float(correct.item())  # host–device synchronisation on CUDA
