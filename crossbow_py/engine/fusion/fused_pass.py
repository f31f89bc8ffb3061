"""The forward and backward pass of all learners over the fused graph, without waiting on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbow_py.core.trees import Tree, detached, in_format, map_tree
from crossbow_py.data.datasets import counted
from crossbow_py.data.feed import Batch
from crossbow_py.engine.bank.layout import add_present, copy_present
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.losses import (
    IGNORED,
    Compared,
    Share,
    compared,
    correct_of_parts,
    is_classification,
    loss_of_rows,
    part_for,
    plain_loss,
    scaled_to_batch,
    smoothed_cross_entropy,
)
from crossbow_py.engine.modules.standardized import StandardizedLoss, comparison
from crossbow_py.engine.native import dense
from crossbow_py.engine.rounds import Round, RoundTasks

_MOST_CLASSES = 16384  # for the loss kernel

# Returns losses [K], right predictions [K] and the outputs' gradient from outputs [K, B, C] and targets [K, B].
LossOfAll = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Learned(NamedTuple):
    """The results of all learners: losses `[K]`, right predictions `[K]` or None, and gradients `[K, *shape]`.

    Where learners have one row of weights, gradients are sums over them, `[*shape]`.
    """

    losses: Tensor
    num_correct: Tensor | None
    gradients: Sequence[Tensor | None]


class FusedPass:
    """The learning tasks of a round. Dropout draws from the learners' generators, so seed them first.

    Training uses only passes from `trusted_pass`.

    Args:
        tasks: what to compute.
        kernels: whether Triton kernels replace operators where possible.
        learners: K neighbouring learners; by default all.
        fuses: whether operators are fused; else they run as they were exported, learner by learner.

    Attributes:
        learners: as given.
        notes: messages for the user about slower operation; grows in the first rounds, and readers clear it.
        source: gives the batches of rounds; None for those of the feed.

    Raises FusionError for models it cannot run.
    """

    def __init__(
        self, tasks: RoundTasks, kernels: bool = False, learners: range | None = None, fuses: bool = True
    ) -> None:
        self._tasks, bank = tasks, tasks.bank
        self.learners = range(bank.num_learners) if learners is None else learners
        example = tasks.feed.for_measuring().batch(0).parts(tasks.accumulate)[0].inputs
        part = part_for(tasks.loss)
        self.graph = FusedGraph(bank.template, example, bank, kernels, self.learners, fuses=fuses, part=part)
        self.notes = self.graph.notes
        self.source: Callable[[Round], Batch] | None = None
        self._loss: LossOfAll | None = None
        self._kernels = kernels
        of_values = tasks.loss.of_values if isinstance(tasks.loss, StandardizedLoss) else tasks.loss
        self._loss_of_rows = loss_of_rows(of_values)
        if plain_loss(tasks.loss) is nn.functional.cross_entropy and tasks.label_smoothing is None and fuses:
            self._loss = self._loss_of_all(kernels)

    def _loss_of_all(self, kernels: bool) -> LossOfAll | None:
        """Return cross-entropy of all learners as a kernel, or in C; None by torch's operators."""
        bank = self._tasks.bank
        if not kernels:
            return dense.cross_entropy_of_learners if dense.serves(*self.graph.trained.values()) else None
        if refusal := serves("loss", bank.device, bank.precision.compute):
            self.notes.append(refusal)
            return None
        # Imported here, because this module must be importable on machines without Triton.
        from crossbow_py.engine.kernels.cross_entropy import cross_entropy_of_learners  # noqa: PLC0415

        return cross_entropy_of_learners

    @property
    def has_kernel(self) -> bool:
        """True if a kernel computes losses."""
        return self._kernels and self._loss is not None

    def batch(self, plan: Round) -> Batch:
        """Return the round's batches `[K, B, ...]`, or `[B, ...]` if all learners take the same."""
        return self.inputs(plan) if self.source is None else self.source(plan)

    def inputs(self, plan: Round) -> Batch:
        """Return the same, as the feed gives it, whatever stands for it in passes."""
        feed, starts = self._tasks.feed, self.starts(plan)
        return feed.batch(starts[0]) if len(starts) == 1 else feed.batches(starts)

    def starts(self, plan: Round) -> tuple[int, ...]:
        """Return the positions of the learners' batches; only one if all take the same."""
        own = plan.starts[self.learners.start : self.learners.stop]
        return own[:1] if self.shares(plan) else own

    def shares(self, plan: Round) -> bool:
        """Return whether the learners take the same batch."""
        return len(set(plan.starts[self.learners.start : self.learners.stop])) == 1

    def learn_in_parts(self, batch: Batch, shared: bool) -> Learned:
        """Return what `learn` does on a batch, by micro-batches whose gradients are added in the bank."""
        tasks, lead = self._tasks, 0 if shared else 1
        if tasks.accumulate == 1:
            return self.learn(batch, shared)
        assert not self.graph.written, "kernels write gradients to where those of micro-batches are added"
        bank, losses, parts = tasks.bank, list[Tensor](), list[Compared]()
        rows = bank.summed_gradients if bank.one_row else bank.stacked_gradients(self.learners)
        if bank.one_row and self.learners.start:  # beside others, of which the first has that row
            rows = [torch.empty_like(own) for own in rows]
        for part, share in tasks.micro_batches(batch, lead):
            # A copy, because operators over learners need those of a part end to end.
            outputs, targets = self._compared(part if shared else part.map(torch.clone), shared)
            outputs = in_format(outputs, tasks.bank.precision.master)
            own = self._losses(outputs, targets, share)
            (add_present if losses else copy_present)(rows, self._gradients(own.sum(), None))
            losses.append(own.detach())
            parts.append(Compared(detached(outputs), targets))
        correct = correct_of_parts(parts, tasks.ignored, batch.targets.shape[lead], 1)
        return Learned(torch.stack(losses).sum(0), correct, rows)

    def _compared(self, batch: Batch, shared: bool) -> Compared:
        """Return what the losses of all learners compare, `[K, B, ...]`."""
        outputs = self.graph.run(batch.inputs, shared)
        targets = batch.targets.expand(len(self.learners), *batch.targets.shape) if shared else batch.targets
        return compared(self._tasks.loss, outputs, targets, lead=1)

    def learn(self, batch: Batch, shared: bool) -> Learned:
        """Return losses and their gradients at the learners' weights. Some gradients are rows of the bank."""
        bank, size = self._tasks.bank, batch.targets.shape[0 if shared else 1]
        outputs, targets = self._compared(batch, shared)
        classes = is_classification(outputs, targets, lead=1) and targets.dtype == torch.int64
        classes = classes and outputs.shape[:2] == targets.shape  # else torch says what is wrong
        few = classes and outputs.shape[2] <= _MOST_CLASSES
        if self._loss is not None and few and (self._kernels or dense.serves_loss(outputs)):
            losses, num_correct, given = self._loss(outputs.detach(), targets)
            num_correct = scaled_to_batch(num_correct, targets, self._tasks.ignored, size, 1)
            return Learned(losses, num_correct, self._gradients(outputs, given))
        outputs = in_format(outputs, bank.precision.master)
        losses = self._losses(outputs, targets)
        gradients = self._gradients(losses.sum(), None)
        correct = correct_of_parts([(detached(outputs), targets)], self._tasks.ignored, size, 1)
        return Learned(losses.detach(), correct, gradients)

    def learn_apart(
        self, batch: Batch, shared: bool, rows: Sequence[int]
    ) -> tuple[Tensor, Iterator[list[Tensor | None]]]:
        """Return the losses of all learners and the gradients of some of these, also where they have one row.

        Each learner's are computed as they are asked for, and may lie where the next one's will.
        """
        outputs, targets = self._compared(batch, shared)
        losses = self._losses(in_format(outputs, self._tasks.bank.precision.master), targets)
        return losses.detach(), (self._gradients(losses[row], None, keeps=True) for row in rows)

    def _gradients(self, of: Tensor, given: Tensor | None, keeps: bool = False) -> list[Tensor | None]:
        """Return gradients in the order of the layout; the graph of autograd stays if it `keeps` it."""
        graph, trained = self.graph, self.graph.trained
        asked = [name for name in trained if name not in graph.written]
        leaves = [graph.anchor, *(trained[name] for name in asked)] if graph.written else list(trained.values())
        found = torch.autograd.grad(of, leaves, given, retain_graph=keeps, allow_unused=True)
        if not graph.written:
            if any(gradient is None for gradient in found):
                self._tasks.tell_missing_gradients(found)
            return list(found)
        by_name = dict(zip(asked, found[1:], strict=True)) | graph.written_gradients()
        return [by_name[name] for name in trained]

    def _losses(self, outputs: Tree, targets: Tensor, share: Share | None = None) -> Tensor:
        """Return the learners' losses `[K]`, or shares of them: cross-entropy in one call, others in a loop."""
        smoothing, whole = self._tasks.label_smoothing, share and share.whole
        if smoothing is not None:
            return smoothed_cross_entropy(outputs, targets, smoothing[self.learners.start : self.learners.stop], whole)
        is_one = isinstance(outputs, Tensor)
        is_cross_entropy = plain_loss(self._tasks.loss) is nn.functional.cross_entropy
        if is_cross_entropy and is_one and outputs.ndim == 3 and targets.shape in (outputs.shape, outputs.shape[:2]):
            each = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
            each = each.view(outputs.shape[:2])
            if whole is None and targets.is_floating_point():  # shares of the classes
                return each.mean(1)
            return each.sum(1) / (counted(targets, IGNORED).sum(1) if whole is None else whole)
        if self._loss_of_rows is not None and share is None:
            _, values, own_targets = comparison(self._tasks.loss, outputs, targets)
            if isinstance(values, Tensor) and values.shape == own_targets.shape:
                return self._loss_of_rows(values, own_targets)
        losses = []
        for row, own in enumerate(targets):
            output = map_tree(itemgetter(row), outputs)
            loss = partial(self._tasks.loss, output, own)
            losses.append((loss() if share is None else share.at(row).of(loss, output)).reshape(()))
        return torch.stack(losses)


class PassNotes:
    """The messages for the user from passes over one model, each once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[str] = []
        self._said: set[str] = set()
        self._looped: set[str] = set()
        self._names_loops = True

    def read(self, fused: FusedPass) -> None:
        """Take the notes of a pass that has run, before it runs again."""
        with self._lock:
            self._new += fused.notes
            fused.notes.clear()
            self._looped |= set(fused.graph.looped)

    def take(self) -> list[str]:
        """Return new messages, and the first time that there are some, the operators without a rule."""
        with self._lock:
            found = [sentence for sentence in dict.fromkeys(self._new) if sentence not in self._said]
            self._new.clear()
            self._said |= set(found)
            if self._names_loops and self._looped:
                names = ", ".join(sorted(self._looped))
                found.append(f"Operators run learner by learner, for want of a rule that fuses them: {names}.")
                self._names_loops = False
        return found
