"""The common part of checks of native code and of kernels: a small bank, and a round by the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.triton_launch import interprets
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.row_update import Step, TorchUpdate

NUM_LEARNERS = 3
# Rounds that differ in code, not only in numbers.
ROUNDS = (
    LinearRound(0.3, momentum=0.9),
    LinearRound(0.7, momentum=0.2, share=1 / 3, follows_learners=True),
    None,
)
# Inputs and outputs of the first layer, odd ones: rows of several tiles, and on CUDA of hundreds.
_LARGE, _SMALL = (509, 521), (53, 41)
_GROUPED = ("1.weight", "0.bias", "0.weight")  # the last bias is in no group


class _Undrawn(nn.Linear):
    """A layer whose values are not drawn. `to_empty` of one on `meta` has torch import sympy, for most of a second."""

    def reset_parameters(self) -> None: ...


def random_bank(optimizer: Optimizer, device: torch.device, precision: Precision, least: float = 0.0) -> ReplicaBank:
    """Return a bank with odd row lengths and the same values in [least, least + 1) each time.

    Draws nothing from torch's own generators, which are those of the run.
    """
    wide, narrow = _LARGE if device.type == "cuda" and not interprets() else _SMALL
    groups = optimizer.groups
    layers = _Undrawn(wide, narrow, device=device), _Undrawn(narrow, 3, device=device)
    bank = ReplicaBank(
        nn.Sequential(*layers), NUM_LEARNERS, device=device, precision=precision,
        state_names=optimizer.state_names, order="blocks", matrices=("0.weight",) if optimizer.TAKES_MATRICES else (),
        groups={name: 1 + number % len(groups) for number, name in enumerate(_GROUPED)} if groups else None,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    for rows in (bank.weights, bank.gradients, *bank.state.values(), bank.z, bank.z_prev, bank.shadow):
        rows.storage.uniform_(generator=generator).add_(least)
    return bank


def round_by_row(
    update: TorchUpdate, bank: ReplicaBank, averaging: LinearRound | None, steps: Sequence[Step | None]
) -> list[float]:
    """Run a round learner by learner, without those that have no step, and return the norms of their gradients."""
    norms = [update.gradient_norm(bank.trained_row(j)) for j in range(bank.num_learners)]
    for learner, step in enumerate(steps):
        if step is not None:
            update.correct(learner, bank.trained_row(learner), averaging, step)
    if averaging is not None:
        update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
        bank.total.storage.mul_(averaging.share)
        update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], averaging)
    return norms


def written_values(bank: ReplicaBank) -> list[Tensor]:
    """Return what a round writes to learners, z and z_prev, without padding."""
    rows = (bank.trained_row(j) for j in range(bank.num_learners))
    lists = (vectors for row in rows for vectors in (row.weights, row.shadow or [], *row.state.values()))
    return [*(vector for vectors in lists for vector in vectors), *bank.z.trained(), *bank.z_prev.trained()]
