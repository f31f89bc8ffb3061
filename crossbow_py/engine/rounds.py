"""A round: its plan, the bodies of its tasks, and its outcome.

Every executor runs these bodies, and decides only when and where. A body writes only its own learner's row, so bodies
of different learners may run at the same time; the executor orders corrections and averaging around z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crossbow_py.averaging.rule import GradientMean, LinearRound, OuterStep, RoundAveraging
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, call, detached, in_format
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.layout import TrainedRow, add_present, copy_present, norm
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.goodput import Comparison
from crossbow_py.engine.modules.compiled import CompiledModels, Model
from crossbow_py.engine.modules.dropout import OwnDraws, counter_seed
from crossbow_py.engine.modules.losses import (
    Compared,
    Loss,
    Share,
    compared,
    correct_of_parts,
    ignored_target,
    num_averaged,
    smoothed_cross_entropy,
)
from crossbow_py.engine.tasks import (
    AveragingTask,
    ComparisonTask,
    CorrectionTask,
    GradientMeanTask,
    LearningTask,
    Task,
)
from crossbow_py.engine.trust.compare import kept_buffers
from crossbow_py.engine.update.row_update import Step, TorchUpdate

_DRAWS_LATE = (
    "The model has begun to draw random numbers, after rounds without any: those of its first rounds with some came "
    "from torch's own generator, and will not repeat."
)
_MOST_FALSE_ALARMS = 3
CacheFeatures = Literal["auto"] | bool
_Take = Callable[[Sequence[Tensor | None]], None]
_WATCHED = 16  # rounds: the first, and one in as many, in which a model that drew nothing is watched, at 6 µs a learner


class Draws(NamedTuple):
    """The seed and the round of a run whose only learner would draw the same random numbers."""

    seed: int
    round_index: int


def take_all(notes: list[str]) -> list[str]:
    """Remove and return what a list holds, one by one, because another thread may add to it meanwhile."""
    found = []
    while notes:
        found.append(notes.pop(0))
    return found


@dataclass(frozen=True)
class Round:
    """The plan of a round.

    Attributes:
        index: the index of the round, from 0 over the whole run.
        starts: the position of each learner's batch in the sample stream.
        learning_rates: γ of each learner.
        together: what is averaged in this round and how, or None.
        joins_nodes: whether nodes, each with its own z, average z among them in this round.
        draws: the random numbers of each learner's dropout, if learners belong to different runs; else empty.
        compares: whether the gradients of several learners are compared.
    """

    index: int
    starts: tuple[int, ...]
    learning_rates: tuple[float, ...]
    together: RoundAveraging | None
    joins_nodes: bool = False
    draws: tuple[Draws, ...] = ()
    compares: bool = False

    @property
    def averaging(self) -> LinearRound | None:
        """The coefficients of corrections and averaging, in rounds of a rule that pulls learners as they step."""
        return self.together if isinstance(self.together, LinearRound) else None

    @property
    def averages(self) -> bool:
        """Whether z moves in this round."""
        return self.together is not None and (isinstance(self.together, OuterStep) or self.together.moves_z)

    @property
    def outer_step(self) -> OuterStep | None:
        """The outer step after the round, when nothing is in flight, or None; executors take no part in it."""
        return self.together if isinstance(self.together, OuterStep) else None


@dataclass
class RoundOutcome:
    """The results of a round's tasks, complete once the last of them is over.

    Attributes:
        plan: the plan of the round.
        losses: each learner's loss.
        num_correct: each learner's `correct_of_batch`, or None without classes.
        finite: whether each learner's loss and gradient were finite.
        gradient_norm: the norm of the sum of gradients in `bank.total`, if all learners step by it; else NaN.
        comparison: the comparison of this device's gradients, in rounds that make one.
    """

    plan: Round
    losses: list[float] = field(init=False)
    num_correct: list[float | None] = field(init=False)
    finite: list[bool] = field(init=False)
    gradient_norm: float = math.nan
    comparison: Comparison | None = None

    def __post_init__(self) -> None:
        learners = len(self.plan.starts)
        self.losses, self.num_correct = [math.nan] * learners, [None] * learners
        self.finite = [True] * learners

    @property
    def non_finite_learners(self) -> list[int]:
        """The learners whose loss or gradient was not finite."""
        return [learner for learner, finite in enumerate(self.finite) if not finite]


class GradientSum(NamedTuple):
    """The sum of some gradients, matching lists, and the squared norm of each."""

    total: list[Tensor]
    squares: list[float]

    @classmethod
    def of(cls, gradients: Iterable[list[Tensor]]) -> GradientSum:
        """Return that of gradients which need not be there at the same time."""
        total, squares = list[Tensor](), list[float]()
        for own in gradients:
            if total:
                torch._foreach_add_(total, own)
            else:
                total = [each.clone() for each in own]
            squares.append(norm(own) ** 2)
        return cls(total, squares)


def comparison_of(*sums: GradientSum) -> Comparison:
    """Return the comparison of all gradients that went into some sums."""
    total, squares = sums[0].total, [square for own in sums for square in own.squares]
    for own in sums[1:]:
        total = list(torch._foreach_add(total, own.total))
    n = len(squares)
    return Comparison(sum(squares) / n, (norm(total) / n) ** 2, n)


def smoothing_rows(share: float, bank: ReplicaBank) -> Tensor | None:
    """Return the label smoothing of every row of a bank, [capacity]; None for none."""
    return torch.full((bank.capacity,), share, dtype=bank.precision.master, device=bank.device) if share else None


class RoundTasks:
    """The bodies of a bank's tasks. Thread-safe across learners, as the module's docstring says.

    Args:
        bank, update, feed, loss, collective: the learners, their steps, batches and loss, and the sums over devices.
        seed: the seed of dropout, in rounds without `draws`.
        compile_model: whether modules are compiled by torch.compile.
        label_smoothing: ε of every row, `[capacity]` on the bank's device; with it the loss is cross-entropy.
        compares: whether some rounds compare gradients.
        accumulate: into how many micro-batches a learner's batch is split, whose gradients are added.
        cache_features: whether executor `fused` keeps what frozen layers make of each sample: `auto` where it pays.

    Attributes:
        notes: messages for the user, from any thread; some come once for each learner.
        ignored: the target that the loss ignores, if the data may have it; else None.
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
        compares: bool = False,
        accumulate: int = 1,
        cache_features: CacheFeatures = False,
    ) -> None:
        self._compiled = CompiledModels() if compile_model else None
        self._summed_rows: list[TrainedRow] = []
        self._without_draws: set[int] = set()  # learners whose models draw only in dropout modules
        self._drawing: set[int] = set()  # learners to watch again, because torch's generator has moved
        self._false_alarms = 0
        self._has_told_missing_gradients = False
        self.notes: list[str] = []
        self.bank, self.update, self.feed, self.loss = bank, update, feed, loss
        self.seed, self.collective, self.label_smoothing, self.compares = seed, collective, label_smoothing, compares
        self.accumulate, self.cache_features = accumulate, cache_features
        ignored = ignored_target(loss)
        self.ignored = ignored if ignored is not None and feed.may_have_target(ignored) else None

    @property
    def gradient_mean(self) -> GradientMean | None:
        """The groups that average gradients, or None if no two learners do."""
        mean, bank = self.update.rule.gradient_mean, self.bank
        return mean if mean and mean.has_effect(bank.num_learners, self.collective.num_devices) else None

    def model(self, learner: int) -> Model:
        """Return the learner's module, compiled with `compile_model`."""
        module = self.bank.module(learner)
        return module if self._compiled is None else self._compiled(module, learner)

    def body(self, task: Task) -> Callable[[RoundOutcome], None]:
        """Return the body of a task: a function of the round's outcome that works in the calling thread."""
        match task:
            case LearningTask():
                return partial(self.learn, task.learner)
            case CorrectionTask():
                return partial(self.correct, task.learner)
            case AveragingTask():
                return self.average
            case GradientMeanTask():
                return self.average_gradients
            case ComparisonTask():
                return self.compare_gradients

    def learn(self, learner: int, outcome: RoundOutcome) -> None:
        """Write the gradient of the learner's loss at w_j to G_j; loss and right predictions go to the outcome.

        Host–device synchronisation on CUDA.
        """
        bank = self.bank
        self._learn(learner, outcome, partial(bank.store_gradients, learner), partial(bank.add_gradients, learner))

    def learn_apart(self, learners: Iterable[int], outcome: RoundOutcome) -> GradientSum:
        """Do `learn` of learners that have one row in the bank, but write no gradient there; return their sum."""
        own = [torch.empty_like(view) for view in self.bank.summed_gradients]

        def gradients() -> Iterator[list[Tensor]]:
            for learner in learners:
                self._learn(learner, outcome, partial(copy_present, own), partial(add_present, own))
                yield own

        return GradientSum.of(gradients())

    def _learn(self, learner: int, outcome: RoundOutcome, store: _Take, add: _Take) -> None:
        """Do `learn`, with the gradients of the first micro-batch stored, and those of others added."""
        bank = self.bank
        if bank.has_dropout or self._may_draw(learner):
            self.seed_dropout(learner, outcome.plan)
        batch = self.feed.batch(outcome.plan.starts[learner])
        losses, parts = list[Tensor](), list[Compared]()
        for part, share in self.micro_batches(batch):
            output, targets = self.read(self._outputs(learner, part.inputs, outcome.plan.index), part.targets)
            loss = self.loss_of(learner, output, targets, share)
            try:
                gradients = torch.autograd.grad(loss, bank.trained_parameters(learner), allow_unused=True)
            except RuntimeError:
                bank.check_bindings(averages=False)  # explains it, if forward has frozen a parameter
                raise
            if any(gradient is None for gradient in gradients):
                self.tell_missing_gradients(gradients)
            (add if losses else store)(gradients)
            losses.append(loss.detach())
            parts.append(Compared(detached(output), targets))
        # Host–device synchronisation on CUDA.
        outcome.losses[learner] = losses[0].item() if len(losses) == 1 else float(torch.stack(losses).sum())
        correct = correct_of_parts(parts, self.ignored, batch.size)
        outcome.num_correct[learner] = None if correct is None else float(correct.item())  # likewise

    def micro_batches(self, batch: Batch, lead: int = 0, count: int | None = None) -> list[tuple[Batch, Share | None]]:
        """Return a batch in `count` parts, by default `accumulate`, with their shares of its mean loss.

        The batch has `lead` dimensions before that of samples. A whole one has no share.
        """
        count = self.accumulate if count is None else count
        if count == 1:
            return [(batch, None)]
        whole = num_averaged(self.loss, batch.targets, lead)
        parts = batch.parts(count, lead)
        return [(part, Share(num_averaged(self.loss, part.targets, lead), whole)) for part in parts]

    def tell_missing_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Note once which parameters got no gradient. `gradients` are in the order of the layout."""
        if self._has_told_missing_gradients:
            return
        self._has_told_missing_gradients = True
        names = [name for name, own in zip(self.bank.layout.names, gradients, strict=False) if own is None]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.notes.append(
            f"The model's {min(names)}{more} got no gradient in a round. It counts as zero: momentum and weight decay "
            "go on to move such parameters, which torch's optimizers leave alone; freeze (requires_grad=False) what is "
            "never used."
        )

    def _may_draw(self, learner: int) -> bool:
        """Return whether the learner's model may draw outside dropout modules, until its first pass has shown it.

        On CUDA and in compiled models such numbers come from torch's own generator.
        """
        return self.bank.device.type == "cpu" and self._compiled is None and learner not in self._without_draws

    def read(self, output: Tree, targets: Tensor) -> Compared:
        """Return what the loss compares, in master precision."""
        return compared(self.loss, in_format(output, self.bank.precision.master), targets)

    def _outputs(self, learner: int, inputs: Tree, round_index: int) -> Tree:
        """Return the learner's outputs, with random numbers from its own generator."""
        watched = round_index < _WATCHED or round_index % _WATCHED == 0
        if watched and learner in self._without_draws and self._false_alarms < _MOST_FALSE_ALARMS:
            before = torch.random.get_rng_state()
            outputs = call(self.model(learner), inputs)
            if not torch.equal(before, torch.random.get_rng_state()):
                self._without_draws.discard(learner)
                self._drawing.add(learner)
            return outputs
        if not self._may_draw(learner):
            return call(self.model(learner), inputs)
        with OwnDraws(self.bank.generators[learner]) as draws:
            outputs = call(self.model(learner), inputs)
        if learner in self._drawing:
            self._drawing.discard(learner)
            if draws.has_drawn:
                self.notes.append(_DRAWS_LATE)
            else:  # another thread has drawn: a loss, or the caller of this package
                self._false_alarms += 1
        if not draws.has_drawn:
            self._without_draws.add(learner)
        return outputs

    def loss_of(self, learner: int, output: Tree, targets: Tensor, share: Share | None = None) -> Tensor:
        """Return the learner's loss on a batch, a mean, or a micro-batch's share of it."""
        if self.label_smoothing is None:
            loss = partial(self.loss, output, targets)
            return loss() if share is None else share.of(loss, output)
        return smoothed_cross_entropy(output, targets, self.label_smoothing[learner], share and share.whole)

    def seed_dropout(self, learner: int, plan: Round) -> None:
        """Seed the learner's generator for the round's dropout masks."""
        own = self.bank.first_learner + learner
        seed, index = plan.draws[learner] if plan.draws else (self.seed, plan.index)
        seed = counter_seed(seed, "dropout", index, 0 if plan.draws else own)
        self.bank.generators[learner].manual_seed(seed)

    def compare_gradients(self, outcome: RoundOutcome) -> None:
        """Compare the learners' gradients in the bank, see `compare`."""
        bank = self.bank
        gradients = [bank.gradients.trained(learner) for learner in range(bank.num_learners)]
        outcome.comparison = comparison_of(GradientSum.of(gradients))

    def compare_halves(self, learner: int, batch: Batch) -> Comparison | None:
        """Compare the gradients of two halves of a batch at the learner's weights; None of a batch too small.

        Nothing may be in flight, and nothing is changed. Host–device synchronisation on CUDA.
        """
        bank, half = self.bank, len(batch.targets) // 2
        count = -(-self.accumulate // 2)  # parts of a half, no larger than micro-batches
        if half < 2 * count:  # BatchNorm of one sample has no statistics
            return None
        with kept_buffers(bank.module(learner)), kept_generators(bank.device):
            found = [
                self._gradient_in_parts(learner, batch.map(itemgetter(part)), count)
                for part in (slice(half), slice(half, 2 * half))
            ]
        s, q, _ = comparison_of(GradientSum.of(found))
        return Comparison.of_halves(s, q)

    def _gradient_in_parts(self, learner: int, batch: Batch, count: int) -> list[Tensor]:
        """Return the gradient of the learner's loss on a batch, by `count` parts; nothing is written to the bank."""
        module, trained, total = self.bank.module(learner), self.bank.trained_parameters(learner), list[Tensor]()
        for part, share in self.micro_batches(batch, count=count):
            loss = self.loss_of(learner, *self.read(call(module, part.inputs), part.targets), share)
            found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            own = [each.to_dense() for each in found]
            total = list(torch._foreach_add(total, own)) if total else own
        return total

    def average_gradients(self, outcome: RoundOutcome) -> None:
        """Set G_j to the mean of the gradients of j's group, in which non-finite ones count as zero.

        If all learners are one group and the update keeps gradients, the sum of gradients is written to `bank.total`
        instead.
        """
        assert self.gradient_mean is not None, "the scheduler issues this only if gradients are averaged"
        if self.summed_rows:
            rows = [self.bank.gradients.trained(learner) for learner in range(self.bank.num_learners)]
            self.sum_gradients(rows, outcome)
            return
        self.gate_gradients(outcome)
        self.bank.average_gradients(self.gradient_mean, self.collective)

    @property
    def summed_rows(self) -> list[TrainedRow]:
        """The learners' rows with the sum of all gradients in place of their own; empty if they do not share it."""
        bank = self.bank
        if not bank.one_row:
            if not self.update.KEEPS_GRADIENTS or self.gradient_mean is None or not bank.replicas_identical:
                return []
            if self.update.optimizer.clips_groups:  # which need the norms of the mean's parts
                return []
        if len(self._summed_rows) != bank.num_learners:
            total = bank.total.trained()
            self._summed_rows = [replace(bank.trained_row(j), gradients=total) for j in range(bank.num_learners)]
        return self._summed_rows

    def sum_gradients(
        self, gradients: Sequence[list[Tensor]], outcome: RoundOutcome, store: Callable[[], None] | None = None
    ) -> None:
        """Write the sum of all devices' gradients to `bank.total`, and its norm to the outcome.

        If the sum is not finite, each learner's gradient is checked, and those that are not finite are left out, as the
        outcome says afterwards. `store` writes the gradients, lists of vectors, to the bank, if they are not there.
        """
        bank, summed = self.bank, self.summed_rows[0]
        self.update.sum(summed.gradients, gradients)
        outcome.gradient_norm = self.update.gradient_norm(summed)
        if not all(map(math.isfinite, [*outcome.losses, outcome.gradient_norm])):
            if store is not None:
                store()
            self.gate_gradients(outcome)
            self.update.sum(summed.gradients, [bank.gradients.trained(j) for j in range(bank.num_learners)])
            outcome.gradient_norm = self.update.gradient_norm(summed)
        self._sum_over_devices(outcome)

    def _sum_over_devices(self, outcome: RoundOutcome) -> None:
        """All-reduce the sum of gradients in `bank.total`, whose norm the outcome has."""
        bank, summed = self.bank, self.summed_rows[0]
        self.collective.all_reduce_sum(bank.total.storage)
        if not self.collective.is_alone:
            outcome.gradient_norm = self.update.gradient_norm(summed)
        if math.isfinite(outcome.gradient_norm):
            self.update.prepare_shared(bank, summed, self._summed_scale(outcome))

    def correct_one_row(
        self, gradients: Sequence[Tensor | None], outcome: RoundOutcome, alone: Callable[[], Iterable[list[Tensor]]],
        others: Sequence[Sequence[Tensor | None]] = (),
    ) -> None:  # fmt: skip
        """Step the one row of all learners by the mean of their gradients, given the sum, in layout order.

        Sums of `others` are added to it; an empty one is zero. If the whole is not finite, gradients that are not are
        left out: `alone` gives those of each learner.
        """
        bank, update = self.bank, self.update
        copy_present(bank.summed_gradients, gradients)
        for own in filter(None, others):
            add_present(bank.summed_gradients, own)
        summed = self.summed_rows[0]
        outcome.gradient_norm = update.gradient_norm(summed)
        if not all(map(math.isfinite, [*outcome.losses, outcome.gradient_norm])):
            bank.total.zero_row(0)
            for learner, own in enumerate(alone()):
                outcome.finite[learner] = math.isfinite(norm(own)) and math.isfinite(outcome.losses[learner])
                if outcome.finite[learner]:
                    add_present(bank.summed_gradients, own)
            outcome.gradient_norm = update.gradient_norm(summed)
        self._sum_over_devices(outcome)
        steps = [self.next_summed_step(learner, outcome) for learner in range(bank.num_learners)]
        if steps[0] is not None:
            update.correct(0, summed, outcome.plan.averaging, steps[0])

    def gradients_alone(self, plan: Round, batch: Batch, shared: bool, learners: range) -> Iterator[list[Tensor]]:
        """Yield each learner's gradient by its module, on its part of `[K, B, ...]` or the batch that all share."""
        for row, learner in enumerate(learners):
            own = batch if shared else batch.map(itemgetter(row))
            self.seed_dropout(learner, plan)
            with kept_buffers(self.bank.module(learner)), OwnDraws(self.bank.generators[learner]):
                found = self._gradient_in_parts(learner, own, self.accumulate)
            yield found

    def _summed_scale(self, outcome: RoundOutcome) -> float:
        """Return the factor that turns the sum of gradients into their mean, clipped."""
        count = float(self.bank.total_learners)
        return self.update.optimizer.gradient_scale(outcome.gradient_norm / count) / count

    def gate_gradients(self, outcome: RoundOutcome) -> None:
        """Set G_j to zero for learners whose loss or gradient norm is not finite."""
        for learner in range(self.bank.num_learners):
            norm = self.update.gradient_norm(self.bank.trained_row(learner))
            outcome.finite[learner] = math.isfinite(norm) and math.isfinite(outcome.losses[learner])
            if not outcome.finite[learner]:
                self.bank.gradients.zero_row(learner)

    def correct(self, learner: int, outcome: RoundOutcome) -> None:
        """Write the correction to C_j, from the weights at which the gradient was taken; then w_j ← w_j − γ·u_j − c_j.

        The gate: a learner whose loss or gradient norm is not finite keeps its row and adds nothing to the sum. If
        gradients are averaged, its own loss does not count, as the gradient is not its own, and a group keeps its rows
        only if none of its learners is finite.
        """
        summed = self.summed_rows
        if summed:
            row, step = summed[learner], self.next_summed_step(learner, outcome)
        else:
            row = self.bank.trained_row(learner)
            step = self.next_step(learner, self.update.gradient_norm(row), outcome)
            if step is not None and self.update.optimizer.clips_groups:
                step = step._replace(group_scales=self.update.optimizer.group_scales(row))
        if step is not None:
            self.update.correct(learner, row, outcome.plan.averaging, step)
        elif outcome.plan.averaging is not None:  # in other rounds averaging may still read C
            self.bank.corrections.zero_row(learner)

    def next_step(self, learner: int, gradient_norm: float, outcome: RoundOutcome) -> Step | None:
        """Return the learner's next step, with a clipped gradient, and count it; None if the gate holds it back."""
        bank, optimizer = self.bank, self.update.optimizer
        mean, finite = self.gradient_mean, math.isfinite(gradient_norm)
        own = outcome.finite[learner] if mean else math.isfinite(outcome.losses[learner])
        steps = finite and (self._is_kept(learner, outcome) if mean else own)
        outcome.finite[learner] = own and finite
        if not steps:
            return None
        bank.step_counts[learner] += 1
        rate, count = outcome.plan.learning_rates[learner], bank.step_counts[learner]
        return Step(rate, count, optimizer.gradient_scale(gradient_norm))

    def _is_kept(self, learner: int, outcome: RoundOutcome) -> bool:
        """Return whether any learner of the group is finite; assumed if all are one group, also on other devices."""
        if self.gradient_mean is None or self.gradient_mean.group_size is None:
            return True
        group = next(group for group in self.bank.gradient_groups if learner in group)
        return any(outcome.finite[other] for other in group)

    def next_summed_step(self, learner: int, outcome: RoundOutcome) -> Step | None:
        """Return `next_step` of a learner that steps by the mean of the gradients whose sum is in `bank.total`."""
        step = self.next_step(learner, outcome.gradient_norm / self.bank.total_learners, outcome)
        return step and step._replace(gradient_scale=self._summed_scale(outcome), is_prepared=True)

    def average(self, outcome: RoundOutcome) -> None:
        """Sum the corrections in learner order, all-reduce the sum, and move z. Writes nothing else of the bank."""
        bank = self.bank
        self.update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
        self.move(outcome)

    def move(self, outcome: RoundOutcome, step: Callable[[LinearRound], None] | None = None) -> None:
        """All-reduce the sum of corrections and move z by its share; then average z over nodes, if the round does.

        `step` moves z by `bank.total`; by default that is the update's step.
        """
        bank, coefficients = self.bank, outcome.plan.averaging
        assert coefficients is not None, "z moves only in rounds that average"
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
