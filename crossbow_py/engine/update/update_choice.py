"""Which update a run or a pack gets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16
from crossbow_py.engine.update.native.library import NativeError, load
from crossbow_py.engine.update.optimizers import Optimizer, as_first
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step, TorchUpdate

_TOLERANCE = 1e-5
_CHECK_STEPS = (Step(0.1, step_count=3, gradient_scale=0.5), None, Step(0.1, step_count=3))
_CHECKED: set[Any] = set()


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
        library = load(cache)
        check_once(optimizer, rule, library)
    except NativeError as error:
        return reference, (
            f"Updates run as torch operators, which is slower for models with many parameters, because {error}; "
            f"{error.remedy}."
        )
    return NativeUpdate(optimizer, rule, library), None


def check_once(optimizer: Optimizer, rule: AveragingRule, library: ctypes.CDLL) -> None:
    """`_check`, which takes a tenth of a second, the first time in this process for what chooses the code in C."""
    terms = {name: getattr(optimizer, name) == 0 for name in optimizer.per_learner()}
    key = (library._name, type(rule), repr(optimizer.shared()), repr(terms))
    if key not in _CHECKED:
        _check(optimizer, rule, library)
        _CHECKED.add(key)


def _check(optimizer: Optimizer, rule: AveragingRule, library: ctypes.CDLL) -> None:
    """Raise NativeError unless rounds of three learners, one of them gated, do what the reference does."""
    optimizer = as_first(optimizer)  # lists may be for more learners than here, or for fewer
    native, reference = NativeUpdate(optimizer, rule, library), TorchUpdate(optimizer, rule)
    for averaging in (LinearRound(0.3, momentum=0.9), None):
        in_one_pass, by_row, expected = (_random_bank(optimizer) for _ in range(3))
        norms = _round_in_one_pass(native, in_one_pass, averaging), _round_by_row(native, by_row, averaging)
        expected_norms = _round_by_row(reference, expected, averaging)
        for bank, found in zip((in_one_pass, by_row), norms, strict=True):
            pairs = [*zip(_compared(bank), _compared(expected), strict=True)]
            pairs.append((torch.tensor(found), torch.tensor(expected_norms)))
            _refuse_unless(pairs)
    shared, expected = _random_bank(optimizer), _random_bank(optimizer)
    _share_gradient(native, shared)
    for learner in range(1, expected.num_learners):
        expected.gradients.copy_row(learner, expected.gradients, 0)
    expected.total.copy_row(0, shared.total)
    _round_by_row(reference, expected, None)
    _refuse_unless([*zip(_compared(shared), _compared(expected), strict=True)])


def _refuse_unless(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise NativeError unless all are close."""
    if not all(_is_close(*pair) for pair in pairs):
        raise NativeError("its results differ from those of torch's operators", "name another C compiler in CC")


def _share_gradient(update: NativeUpdate, bank: ReplicaBank) -> None:
    """A round in one pass in which all learners read the first one's gradient, from where sums of gradients are."""
    rows = StackedRows(bank)
    rows.share_gradient, rows.gradients = True, bank.total.trained()
    torch._foreach_copy_(rows.gradients, bank.gradients.trained(0))
    update.gradient_norms(rows)
    update.correct_all(rows, None, _CHECK_STEPS, moves=True)


def _random_bank(optimizer: Optimizer) -> ReplicaBank:
    """Of rows whose lengths are no multiples of anything, always the same; draws nothing from torch's own generator."""
    layers = torch.nn.Linear(53, 41, device="meta"), torch.nn.Linear(41, 3, device="meta")
    template = torch.nn.Sequential(*layers).to_empty(device="cpu")
    bank = ReplicaBank(
        template,
        len(_CHECK_STEPS),
        device=torch.device("cpu"),
        precision=BF16,
        state_names=optimizer.STATE,
        order="blocks",
    )
    generator = torch.Generator().manual_seed(0)
    for rows in (bank.weights, bank.gradients, *bank.state.values(), bank.z, bank.z_prev, bank.shadow):
        rows.storage.uniform_(generator=generator)
    return bank


def _round_in_one_pass(update: NativeUpdate, bank: ReplicaBank, averaging: LinearRound | None) -> list[float]:
    rows = StackedRows(bank)
    norms = update.gradient_norms(rows)
    update.correct_all(rows, averaging, _CHECK_STEPS, moves=True)
    return norms


def _round_by_row(update: TorchUpdate, bank: ReplicaBank, averaging: LinearRound | None) -> list[float]:
    norms = [update.gradient_norm(bank.trained_row(j)) for j in range(bank.num_learners)]
    for learner, step in enumerate(_CHECK_STEPS):
        if step is not None:
            update.correct(learner, bank.trained_row(learner), averaging, step)
    if averaging is not None:
        update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
        update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], averaging)
    return norms


def _compared(bank: ReplicaBank) -> list[Tensor]:
    """What a round writes, without padding."""
    rows = (bank.trained_row(j) for j in range(bank.num_learners))
    lists = (vectors for row in rows for vectors in (row.weights, row.shadow or [], *row.state.values()))
    learners = [vector for vectors in lists for vector in vectors]
    return [*learners, *bank.total.trained(), *bank.z.trained(), *bank.z_prev.trained()]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else _TOLERANCE  # one digit of bfloat16
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
