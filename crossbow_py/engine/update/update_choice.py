"""The choice of the update of a run or a pack: native code, once a few rounds agree with torch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from crossbow_py.averaging.rule import AveragingRule
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16
from crossbow_py.engine.native.library import NativeError, load
from crossbow_py.engine.trust import not_used, refusal
from crossbow_py.engine.trust.compare import are_close
from crossbow_py.engine.update.agreement import ROUNDS, random_bank, round_by_row, written_values
from crossbow_py.engine.update.optimizers import Optimizer, with_first_settings
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step, TorchUpdate

_FIRST = Step(0.1, step_count=3, gradient_scale=0.5)
_STEPS: tuple[Step | None, ...] = (_FIRST, None, Step(0.1, step_count=3))
_OTHER_COMPILER = "name another C compiler in CC"


def choose_update(
    optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype, cache: Path | None = None
) -> tuple[TorchUpdate, str | None]:
    """Return native code, if there is some that compiles and agrees with the reference, else torch operators.

    If native code failed, the second value is a message for the user.
    """
    reference = TorchUpdate(optimizer, rule)
    if not NativeUpdate.supports(optimizer, rule, device, dtype):
        return reference, None
    try:
        library = load(cache)
    except NativeError as error:
        return reference, not_used("Native updates", f"{error}; {error.remedy}")
    # Everything that selects code in C.
    terms = {name: getattr(optimizer, name) == 0 for name in optimizer.per_learner()}
    key = library._name, type(rule), repr(optimizer.shared()), repr(terms)
    if reason := refusal("native updates", key, partial(_check, optimizer, rule, library), NativeError):
        return reference, not_used("Native updates", f"{reason}; {_OTHER_COMPILER}")
    return NativeUpdate(optimizer, rule, library), None


def _check(optimizer: Optimizer, rule: AveragingRule, library: ctypes.CDLL) -> None:
    """Raise NativeError unless rounds of three learners, one of them gated, do what the reference does."""
    optimizer = with_first_settings(optimizer)  # its lists may be for another number of learners
    native, reference = NativeUpdate(optimizer, rule, library), TorchUpdate(optimizer, rule)

    def bank() -> ReplicaBank:
        return random_bank(optimizer, torch.device("cpu"), BF16)

    for averaging in ROUNDS:
        in_one_pass, by_row, expected = (bank() for _ in range(3))
        rows = StackedRows(in_one_pass)
        norms = native.gradient_norms(rows), round_by_row(native, by_row, averaging, _STEPS)
        native.correct_all(rows, averaging, _STEPS, moves=True)
        expected_norms = round_by_row(reference, expected, averaging, _STEPS)
        for own, found in zip((in_one_pass, by_row), norms, strict=True):
            _require_agreement(own, expected, found, expected_norms)
    # All learners read the first one's gradient, from `total`.
    shared, expected = bank(), bank()
    rows = StackedRows(shared)
    rows.share_gradient, rows.gradients = True, shared.total.trained()
    torch._foreach_copy_(rows.gradients, shared.gradients.trained(0))
    native.gradient_norms(rows)
    steps = _STEPS
    if optimizer.TAKES_MATRICES:  # which are prepared once for all learners, so all must be equal and take a step
        steps = (_FIRST,) * expected.num_learners
        for each in (shared, expected):
            each.settle_state("average")
            for learner in range(1, each.num_learners):
                each.weights.copy_row(learner, each.weights, 0)
        row = replace(shared.trained_row(0), gradients=rows.gradients)
        native.prepare_shared(shared, row, _FIRST.gradient_scale)
    native.correct_all(rows, None, [own and own._replace(is_prepared=True) for own in steps], moves=True)
    for learner in range(1, expected.num_learners):
        expected.gradients.copy_row(learner, expected.gradients, 0)
    expected.total.copy_row(0, shared.total)
    round_by_row(reference, expected, None, steps)
    _require_agreement(shared, expected)


def _require_agreement(
    bank: ReplicaBank, expected: ReplicaBank, norms: Sequence[float] = (), expected_norms: Sequence[float] = ()
) -> None:
    found, wanted = (
        [*written_values(own), *own.total.trained(), torch.tensor(of_gradients)]
        for own, of_gradients in ((bank, norms), (expected, expected_norms))
    )
    if not are_close(found, wanted):
        raise NativeError("its results differ from those of torch's operators", _OTHER_COMPILER)
