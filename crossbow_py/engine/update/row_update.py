"""The updates of a bank's rows by correction and averaging tasks: with torch operators, or in one pass of native code.

`TorchUpdate` is the reference, for every device, dtype, optimizer and rule. `NativeUpdate` does the same for float32
rows on a CPU, optimizers that have a C function and linear rules: it reads and writes every value once, where the
operators make over ten passes, and reads gradients once more for the gate. Both round in the same way; only sums over a
whole gradient differ in their last digits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Array, c_double, c_float, c_void_p
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.engine.bank.layout import TrainedRow, norm
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.native.library import Averaging, Learner, Vector
from crossbow_py.engine.update.optimizers import Optimizer

_STRIPS = 64  # sums of squares of a gradient over fixed strips, so that its norm does not depend on the threads
_VALUES_A_THREAD = 2**15  # the fewest for which torch uses another thread


class Step(NamedTuple):
    """A learner's gradient step.

    Attributes:
        learning_rate: γ.
        step_count: the number of the step, from 1.
        gradient_scale: the factor of the gradient.
        group_scales: those of every group of parameters, if some are clipped by themselves.
        is_prepared: whether the steps of matrices are in place of their gradients already, see `Optimizer.prepare`.
    """

    learning_rate: float
    step_count: int
    gradient_scale: float = 1.0
    is_prepared: bool = False
    group_scales: tuple[float, ...] = ()

    def scale_of(self, group: int) -> float:
        """Return the factor of a group's gradient."""
        return self.group_scales[group] if self.group_scales else self.gradient_scale

    def scale(self, row: TrainedRow, first: int, end: int) -> None:
        """Multiply the gradients of the row's vectors from `first` to `end` by their factors."""
        gradients = row.gradients[first:end]
        if self.group_scales and gradients:
            torch._foreach_mul_(gradients, [self.group_scales[group] for group in row.groups[first:end]])
        elif self.gradient_scale != 1 and gradients:
            torch._foreach_mul_(gradients, self.gradient_scale)


def write_distances(row: TrainedRow) -> None:
    """Set c ← w − z."""
    torch._foreach_copy_(row.corrections, row.weights)
    torch._foreach_sub_(row.corrections, row.z)


class TorchUpdate:
    """The reference. Methods change only their arguments, so learners may update at the same time."""

    NAME = "torch"
    KEEPS_GRADIENTS = False  # whether `correct` leaves gradients unchanged

    def __init__(self, optimizer: Optimizer, rule: AveragingRule) -> None:
        self.optimizer, self.rule = optimizer, rule

    def gradient_norm(self, row: TrainedRow) -> float:
        """Return the norm of the learner's whole gradient, summed in float64. Host–device synchronisation on CUDA."""
        return norm(row.gradients)

    def correct(self, learner: int, row: TrainedRow, averaging: LinearRound | None, step: Step) -> None:
        """Set g ← scale·g; c ← correction from w; w ← (optimizer step of w) − c; shadow ← w. No c without averaging.

        If z follows learners, c becomes w − z afterwards.
        """
        if not step.is_prepared:
            self.prepare([learner], [row], [step])
        step.scale(row, row.num_matrices, len(row.gradients))
        if averaging:
            self.rule.corrections(row.corrections, row.weights, row.z, averaging)
        self.optimizer.step_by_group(learner, row, step.learning_rate, step.step_count)
        if averaging:
            torch._foreach_sub_(row.weights, row.corrections)
            if averaging.follows_learners:
                write_distances(row)
        if row.shadow is not None:
            torch._foreach_copy_(row.shadow, row.weights)

    def prepare(self, learners: Sequence[int], rows: Sequence[TrainedRow], steps: Sequence[Step]) -> None:
        """Put the steps of these learners' matrices, if the optimizer takes any, in place of their gradients."""
        if not self.optimizer.TAKES_MATRICES:
            return
        for row, step in zip(rows, steps, strict=True):
            step.scale(row, 0, row.num_matrices)
        self.optimizer.prepare(learners, rows)

    def prepare_shared(self, bank: ReplicaBank, row: TrainedRow, scale: float) -> None:
        """Do `prepare` of the first learner's `row`, of whose gradient and state all learners have equal copies."""
        if not self.optimizer.TAKES_MATRICES:
            return
        self.prepare([0], [row], [Step(0.0, 0, scale)])
        if bank.one_row:
            return
        for rows in [*bank.state.values(), *([bank.weights] if self.optimizer.prepares_weights else [])]:
            first, *others = (rows.trained(learner)[: row.num_matrices] for learner in range(bank.num_learners))
            for own in others:
                torch._foreach_copy_(own, first)

    def sum(self, total: list[Tensor], corrections: Sequence[list[Tensor]]) -> None:
        """Set total ← Σ_j c_j, in learner order."""
        torch._foreach_copy_(total, corrections[0])
        for own in corrections[1:]:
            torch._foreach_add_(total, own)

    def move(self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], averaging: LinearRound) -> None:
        """Move z by the all-reduced `total`, as the rule does; z_prev becomes the old z."""
        self.rule.average(z, z_prev, total, averaging)


class NativeUpdate(TorchUpdate):
    """The same by update.c, for runs that `supports` allows; its functions release the interpreter lock.

    Structs for C are made once for each learner and each set of learners, and kept.
    """

    NAME = "native"
    KEEPS_GRADIENTS = True

    def __init__(self, optimizer: Optimizer, rule: AveragingRule, library: ctypes.CDLL) -> None:
        super().__init__(optimizer, rule)
        assert optimizer.NATIVE_STEP is not None, "an optimizer without a C function needs TorchUpdate"
        self._library = library
        self._known: WeakKeyDictionary[TrainedRow, Array[Vector]] = WeakKeyDictionary()
        self._alike: tuple[Optimizer | None, bool] = None, False  # of which optimizer only rates differ by learner

    @staticmethod
    def supports(optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether there is C code for everything that such a run does to its rows."""
        on_floats = device.type == "cpu" and dtype == torch.float32
        return on_floats and optimizer.NATIVE_STEP is not None and rule.is_linear

    def gradient_norm(self, row: TrainedRow) -> float:
        return self._norms(self._vectors(row), 1, _num_values(row.weights))[0]

    def correct(self, learner: int, row: TrainedRow, averaging: LinearRound | None, step: Step) -> None:
        if not step.is_prepared:
            self.prepare([learner], [row], [step])
        coefficients = _coefficients(averaging, moves=False)
        self._update(self._vectors(row), self._learners([step], learner), coefficients, _num_values(row.weights))

    def _vectors(self, row: TrainedRow) -> Array[Vector]:
        """Return the row's structs, made once; a bank that has grown has new TrainedRows."""
        if row not in self._known:
            self._known[row] = _vectors(row, self.optimizer)
        return self._known[row]

    def _learners(self, steps: Sequence[Step | None], first: int = 0) -> tuple[Array[Learner], int]:
        """Return the structs of learners from `first` on, group by group, and the number of learners.

        Steps that are the same by settings of all learners have one struct, made once.
        """
        optimizer, alike = self._alike
        if optimizer is not self.optimizer:
            # Where there are matrices, other parameters' rates follow from the learner's own base rate too.
            rates = () if self.optimizer.TAKES_MATRICES else ("learning_rate",)
            alike = not self.optimizer.lists().keys() - {*rates}
            self._alike = self.optimizer, alike
        if alike:
            made = {step: self._groups(first, step) for step in dict.fromkeys(steps)}
            each = [made[step] for step in steps]
        else:
            each = [self._groups(first + index, step) for index, step in enumerate(steps)]
        groups = (2 if self.optimizer.TAKES_MATRICES else 1) * (1 + len(self.optimizer.groups))
        flat = (own[group] if own else Learner(skipped=1) for group in range(groups) for own in each)
        return (Learner * (groups * len(each)))(*flat), len(each)

    def _groups(self, learner: int, step: Step | None) -> list[Learner]:
        """Return a learner's structs, for each group of parameters.

        It is one, or one for matrices, which are prepared, and one for other vectors.
        """
        found: list[Learner] = []
        if step is None:
            return found
        for number in range(1 + len(self.optimizer.groups)):
            rate, scale = step.learning_rate * self.optimizer.rate_of(number), step.scale_of(number)
            scales = [1.0, scale] if self.optimizer.TAKES_MATRICES else [scale]
            given = self.optimizer.of_group(number).native_steps(learner, rate, step.step_count)
            found += [
                Learner(0, own.function, scale, own.decay, (c_float * 8)(*own.values))
                for scale, own in zip(scales, given, strict=True)
            ]
        return found

    def sum(self, total: list[Tensor], corrections: Sequence[list[Tensor]]) -> None:
        for index, out in enumerate(total):
            rows = (c_void_p * len(corrections))(*(own[index].data_ptr() for own in corrections))
            values = out.numel() * len(corrections)
            self._run(values, self._library.crossbow_sum, out.data_ptr(), rows, len(rows), out.numel())

    def move(self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], averaging: LinearRound) -> None:
        for parts in zip(z, z_prev, total, strict=True):
            pointers, count = [part.data_ptr() for part in parts], parts[0].numel()
            self._run(count, self._library.crossbow_move, *pointers, averaging.momentum, count)

    def gradient_norms(self, rows: StackedRows) -> list[float]:
        """Return the norm of every learner's gradient, or of the one that all share."""
        learners = 1 if rows.share_gradient else rows.num_learners
        values = rows.num_values * learners // rows.num_learners
        return self._norms(rows.vectors(self.optimizer), learners, values)

    def correct_all(
        self, rows: StackedRows, averaging: LinearRound | None, steps: Sequence[Step | None], *, moves: bool
    ) -> None:
        """Do `correct` of all learners and `sum` in one pass; learners without a step keep their rows.

        With `moves`, the pass also multiplies the sum by its share and does `move`, which is right if the sum is not
        all-reduced in between.
        """
        taken = [(learner, step) for learner, step in enumerate(steps) if step is not None and not step.is_prepared]
        if taken and self.optimizer.TAKES_MATRICES:
            own = [rows.of(learner) for learner, _ in taken]
            self.prepare([learner for learner, _ in taken], own, [step for _, step in taken])
        vectors = rows.vectors(self.optimizer)
        self._update(vectors, self._learners(steps), _coefficients(averaging, moves), rows.num_values)

    def _update(
        self, vectors: Array[Vector], learners: tuple[Array[Learner], int], coefficients: Averaging, values: int
    ) -> None:
        arguments = vectors, len(vectors), *learners, coefficients
        self._run(values, self._library.crossbow_update, *arguments)

    def _norms(self, vectors: Array[Vector], num_learners: int, values: int) -> list[float]:
        sums = (c_double * (num_learners * _STRIPS))()
        arguments = vectors, len(vectors), sums, num_learners, _STRIPS
        self._run(values, self._library.crossbow_sums_of_squares, *arguments)
        found: list[float] = np.sqrt(np.ctypeslib.as_array(sums).reshape(num_learners, _STRIPS).sum(1)).tolist()
        return found

    def _run(self, values: int, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function with all of torch's threads, or one: a smaller team would end the others of these."""
        function(*arguments, torch.get_num_threads() if values >= 2 * _VALUES_A_THREAD else 1)


class StackedRows:
    """The trained vectors of all learners of a bank in `blocks`, for one pass over them.

    Attributes:
        num_learners: K.
        num_values: the number of trained values of all learners.
        gradients: the gradients to read, `[K, numel]` for each block, strided as in the bank; set in every round.
        share_gradient: whether all learners read one gradient, `[numel]` for each block.
    """

    def __init__(self, bank: ReplicaBank) -> None:
        assert bank.order == "blocks", "one pass over all learners needs order=blocks"
        self.num_learners, self._bank = bank.num_learners, bank
        self.share_gradient = bank.replicas_identical and not bank.is_single
        self.gradients = bank.gradients.flat(0)
        self.num_values = bank.num_learners * _num_values(self.gradients)
        self._array: Array[Vector] | None = None

    def of(self, learner: int) -> TrainedRow:
        """Return a learner's row with its gradient of this round."""
        row = self._bank.trained_row(learner)
        gradients = [
            stacked.as_strided((count,), (1,), stacked.storage_offset() + learner * count)
            for stacked, count in zip(self.gradients, map(torch.numel, row.weights), strict=True)
        ]
        return replace(row, gradients=gradients)

    def vectors(self, optimizer: Optimizer) -> Array[Vector]:
        """Return the structs for C, whose pointers are to the beginnings of blocks."""
        if self._array is None:
            bank = self._bank
            # The views of the first row begin where the blocks do.
            first = TrainedRow(
                weights=bank.weights.trained(0),
                gradients=self.gradients,
                corrections=bank.total.trained(),
                state={name: rows.trained(0) for name, rows in bank.state.items()},
                z=bank.z.trained(),
                shadow=bank.shadow.trained(0) if bank.precision.has_shadow else None,
                num_decayed=bank.weights.num_decayed,
                num_matrices=bank.weights.num_matrices,
                groups=bank.weights.groups,
            )
            self._array = _vectors(first, optimizer, bank.z_prev.trained())
        for vector, gradient in zip(self._array, self.gradients, strict=True):
            vector.gradients = gradient.data_ptr()
            vector.gradient_stride = 0 if self.share_gradient else vector.stride
        return self._array


def _coefficients(averaging: LinearRound | None, moves: bool) -> Averaging:
    if averaging is None:
        return Averaging()
    return Averaging(
        averages=1, moves=moves, follows=averaging.follows_learners, correction=averaging.correction,
        momentum=averaging.momentum, share=averaging.share,
    )  # fmt: skip


def _num_values(vectors: Sequence[Tensor]) -> int:
    return sum(vector.numel() for vector in vectors)


def _vectors(row: TrainedRow, optimizer: Optimizer, z_prev: Sequence[Tensor] | None = None) -> Array[Vector]:
    """Return the structs of a row; `z_prev` is needed only if z may move."""
    states, num_decayed = list(row.state.values()), optimizer.num_decayed(row)
    groups = row.groups or (0,) * len(row.weights)
    return (Vector * len(row.weights))(
        *(
            Vector(
                weights=weights.data_ptr(),
                gradients=row.gradients[index].data_ptr(),
                state=(c_void_p * 2)(*(state[index].data_ptr() for state in states)),
                total=row.corrections[index].data_ptr(),
                z=row.z[index].data_ptr(),
                z_prev=None if z_prev is None else z_prev[index].data_ptr(),
                shadow=None if row.shadow is None else row.shadow[index].data_ptr(),
                count=weights.numel(),
                stride=weights.numel(),
                gradient_stride=weights.numel(),
                decays=int(index < num_decayed),
                group=2 * group + int(index >= row.num_matrices) if optimizer.TAKES_MATRICES else group,
            )
            for index, (weights, group) in enumerate(zip(row.weights, groups, strict=True))
        )
    )
