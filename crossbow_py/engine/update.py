"""What a correction and an averaging task do to the bank's rows: by torch operators, or in one pass by native code.

`TorchUpdate` is the reference, for every device, format, optimizer and rule. `NativeUpdate` does the same for float32
rows on a CPU, optimizers that have a C function and rules that are linear: every value is read and written once, where
the operators make over ten passes. Rounding is alike; only sums over a whole gradient differ in their last digits.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import Array, c_double, c_float, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.engine.native.library import Learner, NativeError, Vector, load
from crossbow_py.engine.optimizers import Optimizer
from crossbow_py.engine.replicas import ReplicaBank, TrainedRow

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Step:
    """One learner's gradient step: γ, the number of the step from 1, and what the gradient is multiplied by first."""

    learning_rate: float
    step_count: int
    gradient_scale: float = 1.0


class TorchUpdate:
    """The reference. Bodies touch what they are given alone, so learners may update at the same time."""

    NAME = "torch"

    def __init__(self, optimizer: Optimizer, rule: AveragingRule) -> None:
        self.optimizer, self.rule = optimizer, rule

    def gradient_norm(self, row: TrainedRow) -> float:
        """Of the learner's whole gradient, summed in float64 over vectors. Synchronises with the host on CUDA."""
        norms = torch._foreach_norm(row.gradients)
        return float(torch.stack(norms).double().square().sum().sqrt())

    def correct(self, learner: int, row: TrainedRow, averaging: LinearRound | None, step: Step) -> None:
        """g ← scale·g; c ← correction from w; w ← (optimizer step of w) − c; shadow ← w. Without averaging, no c."""
        if step.gradient_scale != 1:
            torch._foreach_mul_(row.gradients, step.gradient_scale)
        if averaging:
            self.rule.corrections(row.corrections, row.weights, row.z, averaging)
        self.optimizer.step(
            learner,
            row.weights,
            row.gradients,
            row.state,
            num_decayed=row.num_decayed,
            learning_rate=step.learning_rate,
            step_count=step.step_count,
        )
        if averaging:
            torch._foreach_sub_(row.weights, row.corrections)
        if row.shadow is not None:
            torch._foreach_copy_(row.shadow, row.weights)

    def sum(self, total: list[Tensor], corrections: Sequence[list[Tensor]]) -> None:
        """Total ← Σ_j c_j, in learner order."""
        torch._foreach_copy_(total, corrections[0])
        for own in corrections[1:]:
            torch._foreach_add_(total, own)

    def move(self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], averaging: LinearRound) -> None:
        """The rule's step of z by the all-reduced `total`; z_prev ← the old z."""
        self.rule.average(z, z_prev, total, averaging)


class NativeUpdate(TorchUpdate):
    """The same by update.c, for runs `supports` says yes to; calls release the interpreter lock.

    What is passed to C is laid out once for each learner and for each set of learners, and kept.
    """

    NAME = "native"

    def __init__(self, optimizer: Optimizer, rule: AveragingRule, library: ctypes.CDLL) -> None:
        super().__init__(optimizer, rule)
        assert optimizer.NATIVE_STEP is not None, "an optimizer without a C function takes the torch path"
        self._library, self._step = library, optimizer.NATIVE_STEP
        self._known: WeakKeyDictionary[TrainedRow, Array[Vector]] = WeakKeyDictionary()
        self._helpers = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "crossbow update")

    @staticmethod
    def supports(optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there is C code for all that such a run does to its rows."""
        own = type(rule)
        linear = own.corrections is AveragingRule.corrections and own.average is AveragingRule.average
        return device.type == "cpu" and dtype == torch.float32 and optimizer.NATIVE_STEP is not None and linear

    def gradient_norm(self, row: TrainedRow) -> float:
        """See TorchUpdate; summed in float64 over values."""
        vectors, sums = self._vectors(row), (c_double * 1)()
        self._library.crossbow_sums_of_squares(vectors, len(vectors), sums, 1, 0, 1)
        return math.sqrt(sums[0])

    def correct(self, learner: int, row: TrainedRow, averaging: LinearRound | None, step: Step) -> None:
        """See TorchUpdate."""
        vectors, learners = self._vectors(row), (Learner * 1)(self._learner(learner, step))
        self._library.crossbow_update(vectors, len(vectors), learners, 1, self._step, *_correction(averaging), 0, 1)

    def _vectors(self, row: TrainedRow) -> Array[Vector]:
        """The row for C, made once: a bank that grew has other TrainedRows."""
        known = self._known.get(row)
        if known is None:
            known = self._known[row] = _vectors(row, self.optimizer.decay_norm_and_bias)
        return known

    def _learner(self, learner: int, step: Step) -> Learner:
        values = self.optimizer.native_values(learner, step.learning_rate, step.step_count)
        return Learner(
            skipped=0,
            gradient_scale=step.gradient_scale,
            decay=self.optimizer.decay(learner),
            values=(c_float * 8)(*values),
        )

    def sum(self, total: list[Tensor], corrections: Sequence[list[Tensor]]) -> None:
        """See TorchUpdate."""
        for index, out in enumerate(total):
            rows = (c_void_p * len(corrections))(*(own[index].data_ptr() for own in corrections))
            self._library.crossbow_sum(out.data_ptr(), rows, len(rows), out.numel())

    def move(self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], averaging: LinearRound) -> None:
        """See TorchUpdate."""
        for parts in zip(z, z_prev, total, strict=True):
            self._library.crossbow_move(*(part.data_ptr() for part in parts), averaging.momentum, parts[0].numel())

    def gradient_norms(self, rows: StackedRows) -> list[float]:
        """Of every learner."""
        sums = (c_double * rows.num_learners)()
        vectors = rows.vectors(self.optimizer.decay_norm_and_bias)
        self._spread(self._library.crossbow_sums_of_squares, vectors, len(vectors), sums, rows.num_learners)
        return [math.sqrt(value) for value in sums]

    def correct_all(self, rows: StackedRows, averaging: LinearRound | None, steps: Sequence[Step | None]) -> None:
        """`correct` of all learners and `sum`, in one pass; a learner without a step is gated."""
        learners = (Learner * len(steps))(
            *(Learner(skipped=1) if step is None else self._learner(j, step) for j, step in enumerate(steps))
        )
        vectors, correction = rows.vectors(self.optimizer.decay_norm_and_bias), _correction(averaging)
        self._spread(
            self._library.crossbow_update, vectors, len(vectors), learners, len(learners), self._step, *correction
        )

    def _spread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function once for each of as many parts as torch uses threads, side by side."""
        parts = torch.get_num_threads()
        others = [self._helpers.submit(function, *arguments, part, parts) for part in range(1, parts)]
        function(*arguments, 0, parts)
        for other in others:
            other.result()


class StackedRows:
    """The trained vectors of all learners of a bank in blocks, for one pass over them.

    Attributes:
        num_learners: K.
        gradients: what is read, `[K, numel]` a block with the learners' values in the bank's order; set every round.
    """

    def __init__(self, bank: ReplicaBank) -> None:
        assert bank.order == "blocks", "one pass over all learners needs their values side by side"
        self.num_learners, self._bank = bank.num_learners, bank
        self.gradients = [bank.gradients.flat(0)[index] for index in range(bank.num_trained)]
        self._array: Array[Vector] | None = None

    def vectors(self, decay_all: bool) -> Array[Vector]:
        """For C. The first row's views point at the beginning of each block."""
        if self._array is None:
            bank = self._bank
            first = TrainedRow(
                weights=bank.weights.trained(0),
                gradients=self.gradients,
                corrections=bank.total.trained(),
                state={name: rows.trained(0) for name, rows in bank.state.items()},
                z=bank.z.trained(),
                shadow=bank.shadow.trained(0) if bank.precision.has_shadow else None,
                num_decayed=bank.weights.num_decayed,
            )
            self._array = _vectors(first, decay_all)
        for vector, gradient in zip(self._array, self.gradients, strict=True):
            vector.gradients = gradient.data_ptr()
        return self._array


def _correction(averaging: LinearRound | None) -> tuple[int, float]:
    """Whether the round averages, and its correction rate."""
    return (0, 0.0) if averaging is None else (1, averaging.correction)


def _vectors(row: TrainedRow, decay_all: bool) -> Array[Vector]:
    states = list(row.state.values())
    num_decayed = len(row.weights) if decay_all else row.num_decayed
    return (Vector * len(row.weights))(
        *(
            Vector(
                weights=weights.data_ptr(),
                gradients=row.gradients[index].data_ptr(),
                state=(c_void_p * 2)(*(state[index].data_ptr() for state in states)),
                corrections=row.corrections[index].data_ptr(),
                z=row.z[index].data_ptr(),
                shadow=None if row.shadow is None else row.shadow[index].data_ptr(),
                count=weights.numel(),
                stride=weights.numel(),
                gradient_stride=weights.numel(),
                decays=int(index < num_decayed),
            )
            for index, weights in enumerate(row.weights)
        )
    )


def choose_update(
    optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype, cache: Path | None = None
) -> tuple[TorchUpdate, str | None]:
    """Native code where there is some, that compiles and agrees with the reference; else torch operators.

    Returns the update and, where native code failed, a sentence for the user.
    """
    reference = TorchUpdate(optimizer, rule)
    if not NativeUpdate.supports(optimizer, rule, device, dtype):
        return reference, None
    try:
        native = NativeUpdate(optimizer, rule, load(cache))
        _check(native, reference)
    except NativeError as error:
        return reference, (
            f"Updates run as torch operators, which is slower for models with many parameters, because {error}; "
            f"{error.remedy}."
        )
    return native, None


def _check(native: NativeUpdate, reference: TorchUpdate) -> None:
    """Raise NativeError unless both do the same to random rows, of a length that is no multiple of anything."""
    results = []
    for update, correction in itertools.product((native, reference), (0.3, 0.0)):
        averaging = LinearRound(correction, momentum=0.9)
        generator = torch.Generator().manual_seed(0)
        weights, gradients, state0, state1, z, z_prev, corrections, total = (
            [torch.rand(count, generator=generator) for count in (2077, 13)] for _ in range(8)
        )
        state = dict(zip(update.optimizer.STATE, (state0, state1), strict=False))
        shadow = [part.to(torch.bfloat16) for part in weights]
        row = TrainedRow(weights, gradients, corrections, state, z, shadow, num_decayed=1)
        norm = update.gradient_norm(row)
        update.correct(0, row, averaging, Step(learning_rate=0.1, step_count=3, gradient_scale=0.5))
        update.sum(total, [corrections, gradients])
        update.move(z, z_prev, total, averaging)
        tensors = [*weights, *state0, *state1, *corrections, *total, *z, *z_prev, *(part.float() for part in shadow)]
        results.append(torch.cat([*tensors, torch.tensor([norm])]))
    ours, expected = torch.stack(results[:2]), torch.stack(results[2:])
    tolerance = torch.full_like(expected, _TOLERANCE)
    num_shadow = sum(part.numel() for part in shadow)
    tolerance[:, -1 - num_shadow : -1] = 2**-7  # one digit of bfloat16
    if not bool(((ours - expected).abs() <= tolerance * (1 + expected.abs())).all()):
        raise NativeError("its results differ from those of the torch operators", "name another C compiler in CC")
