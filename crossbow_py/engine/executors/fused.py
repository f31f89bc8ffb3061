"""All learners in one pass over one graph: operators run once for K learners, with all of the device's threads.

What small batches leave idle is filled by other learners' work in the same operator. Only the loss, the update and the
average are left to the task bodies; nothing runs at the same time as anything else, so results follow serial's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crossbow_py.engine.dropout import counter_seed
from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.memory import keep_freed_memory
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks, count_correct
from crossbow_py.engine.scheduler import Launch
from crossbow_py.engine.update import NativeUpdate, StackedRows
from crossbow_py.errors import CrossbowError, LearnerError

_STREAM = "all learners"
_IGNORED = -100  # targets that cross_entropy leaves out of its mean


class FusedExecutor(Executor):
    """Runs a round as one forward and one backward pass of all learners. Raises FusionError for models it cannot."""

    NAME = "fused"
    ORDER = "blocks"

    def __init__(self, tasks: RoundTasks) -> None:
        super().__init__(tasks)
        if tasks.bank.device.type == "cpu":
            keep_freed_memory()
        self._graph = FusedGraph(tasks.bank.template, tasks.feed.batch(0).inputs, tasks.bank)
        self._noted = False
        self._rows = StackedRows(tasks.bank) if tasks.bank.order == "blocks" else None

    @property
    def looped(self) -> list[str]:
        """Operators without a rule, run learner by learner; known after the first round."""
        return self._graph.looped

    def _issue(self, launches: tuple[Launch, ...], outcome: RoundOutcome) -> None:
        try:
            with self.span("pass", _STREAM, outcome.plan.index):
                gradients = self._learn(outcome)
            with self.span("update", _STREAM, outcome.plan.index):
                self._update(gradients, outcome)
            self._note_loops()
        except CrossbowError:
            raise
        except Exception as error:
            raise LearnerError("round", outcome.plan.index, _STREAM, error) from error

    def _note_loops(self) -> None:
        """Say once which operators the first round found without a rule."""
        if self.looped and not self._noted:
            names = ", ".join(sorted(set(self.looped)))
            self.notes.append(f"Operators run learner by learner, for want of a rule that fuses them: {names}.")
        self._noted = True

    def _update(self, gradients: Sequence[Tensor | None], outcome: RoundOutcome) -> None:
        """Corrections of all learners and the step of z: in one pass where there is native code for it."""
        tasks, update, averaging = self.tasks, self.tasks.update, outcome.plan.averaging
        learners = range(tasks.bank.num_learners)
        if isinstance(update, NativeUpdate) and self._rows is not None:
            self._rows.gradients = self._in_place(gradients)
            norms = update.gradient_norms(self._rows)
            update.correct_all(self._rows, averaging, [tasks.next_step(j, norms[j], outcome) for j in learners])
            self._rows.gradients = tasks.bank.stacked_gradients()  # lets go of autograd's
            if averaging is not None:
                tasks.move(outcome)
            return
        tasks.bank.store_stacked_gradients(gradients)
        for learner in learners:
            tasks.correct(learner, outcome)
        if averaging is not None:
            tasks.average(outcome)

    def _in_place(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients where autograd left them, if their values lie as the bank's do; else copied to the bank's.

        The update writes them, so one that autograd gave to several parameters serves the first alone.
        """
        found: list[Tensor] = []
        taken: set[int] = set()
        for view, gradient in zip(self.tasks.bank.stacked_gradients(), gradients, strict=True):
            if gradient is None:
                found.append(view.zero_())
            elif gradient.data_ptr() in taken or not _lies_as(gradient, view):
                found.append(view.copy_(gradient))
            else:
                found.append(gradient)
                taken.add(gradient.data_ptr())
        return found

    def _learn(self, outcome: RoundOutcome) -> tuple[Tensor | None, ...]:
        """Gradients `[K, *shape]` of all learners; losses and correct predictions to the outcome."""
        bank, starts = self.tasks.bank, outcome.plan.starts
        for learner, generator in enumerate(bank.generators[: bank.num_learners]):
            generator.manual_seed(counter_seed(self.tasks.seed, "dropout", outcome.plan.index, learner))
        shared = len(set(starts)) == 1
        batch = self.tasks.feed.batch(starts[0]) if shared else self.tasks.feed.batches(starts)
        outputs = self._graph.run(batch.inputs, shared).to(bank.precision.master)
        targets = batch.targets.expand(len(starts), *batch.targets.shape) if shared else batch.targets
        losses = self._losses(outputs, targets)
        parameters = list(self._graph.parameters.trained.values())
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        outcome.losses = losses.tolist()  # host–device synchronisation on CUDA
        outcome.num_correct = _count_correct(outputs.detach(), targets)
        return gradients

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss a learner `[K]`; cross-entropy of classes in one call, any other in a loop."""
        if self.tasks.loss is nn.functional.cross_entropy and outputs.ndim == 3 and targets.ndim == 2:
            each = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
            return each.view(targets.shape).sum(1) / (targets != _IGNORED).sum(1)
        pairs = zip(outputs.unbind(), targets.unbind(), strict=True)
        return torch.stack([self.tasks.loss(output, target) for output, target in pairs])

    def _wait(self, outcome: RoundOutcome) -> None:
        """The round was over when it was issued."""


def _lies_as(tensor: Tensor, other: Tensor) -> bool:
    return tensor.stride() == other.stride() and tensor.dtype == other.dtype


def _count_correct(outputs: Tensor, targets: Tensor) -> list[float | None]:
    """Right predictions of each learner; None where the task is not classification."""
    if outputs.ndim != 3 or targets.ndim != 2 or targets.is_floating_point():
        return [count_correct(output, target) for output, target in zip(outputs, targets, strict=True)]
    found: Sequence[float] = (outputs.argmax(2) == targets).sum(1).tolist()  # host–device synchronisation on CUDA
    return [float(count) for count in found]
