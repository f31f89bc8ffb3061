"""The updates of a bank's rows by correction and averaging tasks: with torch operators, or in one pass of native code.

`TorchUpdate` is the reference, for every device, dtype, optimizer and rule. `NativeUpdate` does the same for float32
rows on a CPU, optimizers that have a C function and linear rules: it reads and writes every value once, where the
operators make over ten passes, and reads gradients once more for the gate. Both round in the same way; only sums over a
whole gradient differ in their last digits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import Array, c_double, c_float, c_void_p
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.engine.bank.layout import TrainedRow, norm
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.update.native.library import Averaging, Learner, Vector
from crossbow_py.engine.update.optimizers import Optimizer

_STRIPS = 64  # sums of squares of a gradient over fixed strips, so that its norm does not depend on the threads
_VALUES_A_PART = 2**17  # updating these takes about as long as handing work to another thread


@dataclass(frozen=True)
class Step:
    """A learner's gradient step: γ, the number of the step from 1, and the factor of the gradient."""

    learning_rate: float
    step_count: int
    gradient_scale: float = 1.0


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
        """Set g ← scale·g; c ← correction from w; w ← (optimizer step of w) − c; shadow ← w. No c without averaging."""
        if step.gradient_scale != 1:
            torch._foreach_mul_(row.gradients, step.gradient_scale)
        if averaging:
            self.rule.corrections(row.corrections, row.weights, row.z, averaging)
        self.optimizer.step(learner, row, step.learning_rate, step.step_count)
        if averaging:
            torch._foreach_sub_(row.weights, row.corrections)
        if row.shadow is not None:
            torch._foreach_copy_(row.shadow, row.weights)

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
        self._library, self._step = library, optimizer.NATIVE_STEP
        self._known: WeakKeyDictionary[TrainedRow, Array[Vector]] = WeakKeyDictionary()
        self._helpers = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "crossbow update")

    @staticmethod
    def supports(optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether there is C code for everything that such a run does to its rows."""
        on_floats = device.type == "cpu" and dtype == torch.float32
        return on_floats and optimizer.NATIVE_STEP is not None and rule.is_linear

    def gradient_norm(self, row: TrainedRow) -> float:
        return self._norms(self._vectors(row), 1, _num_values(row.weights))[0]

    def correct(self, learner: int, row: TrainedRow, averaging: LinearRound | None, step: Step) -> None:
        learners, coefficients = (Learner * 1)(self._learner(learner, step)), _coefficients(averaging, moves=False)
        self._update(self._vectors(row), learners, coefficients, _num_values(row.weights))

    def _vectors(self, row: TrainedRow) -> Array[Vector]:
        """Return the row's structs, made once; a bank that has grown has new TrainedRows."""
        if row not in self._known:
            self._known[row] = _vectors(row, self.optimizer)
        return self._known[row]

    def _learner(self, learner: int, step: Step) -> Learner:
        values = (c_float * 8)(*self.optimizer.native_values(learner, step.learning_rate, step.step_count))
        return Learner(0, step.gradient_scale, self.optimizer.decay(learner), values)

    def sum(self, total: list[Tensor], corrections: Sequence[list[Tensor]]) -> None:
        for index, out in enumerate(total):
            rows = (c_void_p * len(corrections))(*(own[index].data_ptr() for own in corrections))
            values = out.numel() * len(corrections)
            self._spread(values, self._library.crossbow_sum, out.data_ptr(), rows, len(rows), out.numel())

    def move(self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], averaging: LinearRound) -> None:
        for parts in zip(z, z_prev, total, strict=True):
            pointers, count = [part.data_ptr() for part in parts], parts[0].numel()
            self._spread(count, self._library.crossbow_move, *pointers, averaging.momentum, count)

    def gradient_norms(self, rows: StackedRows) -> list[float]:
        """Return the norm of every learner's gradient, or of the one that all share."""
        learners = 1 if rows.share_gradient else rows.num_learners
        values = rows.num_values * learners // rows.num_learners
        return self._norms(rows.vectors(self.optimizer), learners, values)

    def correct_all(
        self, rows: StackedRows, averaging: LinearRound | None, steps: Sequence[Step | None], *, moves: bool
    ) -> None:
        """Do `correct` of all learners and `sum` in one pass; learners without a step keep their rows.

        With `moves`, the pass also does `move`, which is right if the sum is not all-reduced in between.
        """
        learners = (Learner * len(steps))(
            *(Learner(skipped=1) if step is None else self._learner(j, step) for j, step in enumerate(steps))
        )
        vectors = rows.vectors(self.optimizer)
        self._update(vectors, learners, _coefficients(averaging, moves), rows.num_values)

    def _update(self, vectors: Array[Vector], learners: Array[Learner], coefficients: Averaging, values: int) -> None:
        arguments = vectors, len(vectors), learners, len(learners), self._step, coefficients
        self._spread(values, self._library.crossbow_update, *arguments)

    def _norms(self, vectors: Array[Vector], num_learners: int, values: int) -> list[float]:
        sums = (c_double * (num_learners * _STRIPS))()
        arguments = vectors, len(vectors), sums, num_learners, _STRIPS
        self._spread(values, self._library.crossbow_sums_of_squares, *arguments)
        return [math.sqrt(math.fsum(sums[j * _STRIPS : (j + 1) * _STRIPS])) for j in range(num_learners)]

    def _spread(self, values: int, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function for each part of the work side by side, in up to as many parts as torch has threads."""
        parts = max(1, min(torch.get_num_threads(), values // _VALUES_A_PART))
        others = [self._helpers.submit(function, *arguments, part, parts) for part in range(1, parts)]
        function(*arguments, 0, parts)
        for other in others:
            other.result()


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
        self.gradients = bank.gradients.flat(0)[: bank.num_trained]
        self.num_values = bank.num_learners * _num_values(self.gradients)
        self._array: Array[Vector] | None = None

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
            )
            self._array = _vectors(first, optimizer, bank.z_prev.trained())
        for vector, gradient in zip(self._array, self.gradients, strict=True):
            vector.gradients = gradient.data_ptr()
            vector.gradient_stride = 0 if self.share_gradient else vector.stride
        return self._array


def _coefficients(averaging: LinearRound | None, moves: bool) -> Averaging:
    if averaging is None:
        return Averaging()
    return Averaging(averages=1, moves=moves, correction=averaging.correction, momentum=averaging.momentum)


def _num_values(vectors: Sequence[Tensor]) -> int:
    return sum(vector.numel() for vector in vectors)


def _vectors(row: TrainedRow, optimizer: Optimizer, z_prev: Sequence[Tensor] | None = None) -> Array[Vector]:
    """Return the structs of a row; `z_prev` is needed only if z may move."""
    states, num_decayed = list(row.state.values()), optimizer.num_decayed(row)
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
            )
            for index, weights in enumerate(row.weights)
        )
    )
