"""The update of a fused round by Triton kernels: three launches, every value read and written once.

It does what `DeviceUpdate` does with a few dozen operators over all rows (`device_update.py`), for SGD and AdamW, every
rule that is linear in (w, z), and banks in `blocks`. On one device the same pass moves z; with several it writes the
sum of corrections, which is all-reduced before z moves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.core.triton_launch import KernelError, compiles, repeated, require, unavailable
from crossbow_py.engine.bank.layout import DECAYED
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.trust import not_used, refusal, why_not
from crossbow_py.engine.trust.compare import are_close
from crossbow_py.engine.update.agreement import NUM_LEARNERS, ROUNDS, random_bank, round_by_row, written_values
from crossbow_py.engine.update.optimizers import SGD, AdamW, Optimizer, for_learner, with_first_settings
from crossbow_py.engine.update.row_update import Step, TorchUpdate


class KernelUpdate:
    """Corrections and averaging of a bank's learners. Enqueues on the current stream and does not block the host.

    Args:
        bank: a bank in `blocks`, with float32 or float64 rows, on a device where Triton runs. Learners in one row take
            one step, by the gradient in `total`.
        optimizer: SGD or AdamW.
        moves: whether z moves in the same pass; else `move` does it, after the sum was all-reduced.

    Attributes:
        moves: as given.
    """

    def __init__(self, bank: ReplicaBank, optimizer: Optimizer, *, moves: bool) -> None:
        # Imported here, because this module must be importable on machines without Triton.
        from crossbow_py.engine.kernels import update as kernels  # noqa: PLC0415

        self._kernels, self._bank, self.moves = kernels, bank, moves
        self._num_learners = k = 1 if bank.one_row else bank.num_learners
        device, trained = bank.device, len(bank.layout.blocks)
        decayed = trained if optimizer.decay_norm_and_bias else bank.layout.count(*DECAYED)
        blocks = zip(bank.weights.offsets, bank.z.offsets, bank.layout.blocks, strict=True)
        self._tiles = kernels.make_tiles(
            [(at, z_at, block.numel, i < decayed) for i, (at, z_at, block) in enumerate(blocks) if i < trained],
            device,
        )
        self._optimizer, settings = _settings(optimizer, k)
        self._settings = torch.tensor(settings, dtype=torch.float64, device=device)
        self._values = torch.zeros(k, kernels.VALUES.value, dtype=bank.precision.master, device=device)
        self._squares = torch.zeros(len(self._tiles), k, dtype=torch.float64, device=device)
        self._total_squares = torch.zeros(len(self._tiles), dtype=torch.float64, device=device)
        self._unused_squares = torch.zeros_like(self._total_squares)  # of rounds that leave z and `total` alone
        bank.total_squares = self._total_squares if moves and not bank.one_row else None
        # SGD without momentum does not change the state.
        states = [] if isinstance(optimizer, SGD) and optimizer.momentum == 0 else bank.state.values()
        self._rows = kernels.RowsToUpdate(
            weights=bank.weights.storage,
            gradients=(bank.total if bank.one_row else bank.gradients).storage,
            state=tuple(rows.storage for rows in states),
            shadow=bank.shadow.storage if bank.precision.has_shadow else None,
            z=bank.z.storage,
            z_prev=bank.z_prev.storage,
            total=None if moves or bank.one_row else bank.total.storage,
        )

    @staticmethod
    def supports(bank: ReplicaBank, optimizer: Optimizer, rule: AveragingRule) -> bool:
        """Return whether there are kernels for everything that such a run does to its rows."""
        known = type(optimizer) in (SGD, AdamW) and bank.precision.master in (torch.float32, torch.float64)
        return known and rule.is_linear and bank.order == "blocks"

    def correct(
        self,
        averaging: LinearRound | None,
        *,
        results: Tensor,
        loss_column: int,
        finite_column: int,
        learning_rates: Tensor,
        step_counts: Tensor,
    ) -> None:
        """See `DeviceUpdate.correct`; also moves z if `moves`. Tensors are float64 with at least K entries."""
        kernels, k, coefficients = self._kernels, self._num_learners, averaging
        sums = coefficients is None or coefficients.moves_z
        kernels.squares(self._rows.gradients, self._tiles, k, self._squares)
        kernels.prepare(
            self._squares, self._settings, results, learning_rates, step_counts, self._values, k, self._optimizer,
            loss_column=loss_column, finite_column=finite_column,
        )  # fmt: skip
        kernels.update(
            self._rows if sums else replace(self._rows, total=None), self._tiles, self._values, k, self._optimizer,
            correction=None if coefficients is None else coefficients.correction,
            momentum=coefficients.momentum if coefficients is not None and sums and self.moves else None,
            share=1.0 if coefficients is None else coefficients.share,
            follows=coefficients is not None and coefficients.follows_learners,
            total_squares=self._total_squares if sums else self._unused_squares,
        )  # fmt: skip

    def move(self, averaging: LinearRound) -> None:
        """Move z by the all-reduced sum of corrections."""
        bank = self._bank
        self._kernels.move(bank.z.whole(), bank.z_prev.whole(), bank.total.whole(), averaging.momentum)


def _settings(optimizer: Optimizer, num_learners: int) -> tuple[int, list[list[float]]]:
    """Return the number of the optimizer, and a row of settings for each learner."""
    from crossbow_py.engine.kernels import update as kernels  # noqa: PLC0415

    rows, clip_norm = [], optimizer.clip_norm
    for learner in range(num_learners):
        decay = optimizer.decay(learner)
        if isinstance(optimizer, SGD):
            momentum = for_learner(optimizer.momentum, learner)
            rows.append(kernels.sgd_settings(momentum, decay, optimizer.nesterov, clip_norm))
        else:
            assert isinstance(optimizer, AdamW), "other optimizers have no kernel"
            betas = for_learner(optimizer.beta1, learner), for_learner(optimizer.beta2, learner)
            rows.append(kernels.adamw_settings(*betas, optimizer.epsilon, decay, clip_norm))
    return kernels.SGD if isinstance(optimizer, SGD) else kernels.ADAMW, rows


def choose_kernel_update(
    bank: ReplicaBank, optimizer: Optimizer, rule: AveragingRule, *, moves: bool
) -> tuple[KernelUpdate | None, str | None]:
    """Return the kernels if they may be used and agree with the reference; else None, maybe with a message why."""
    if not KernelUpdate.supports(bank, optimizer, rule):
        return None, None
    reason = why_not("update", bank.device) or unavailable(bank.device)
    key = with_first_settings(optimizer), rule, bank.device, bank.precision, moves
    reason = reason or refusal("kernels", key, partial(compiles, partial(check, *key)), KernelError)
    if reason is None:
        return KernelUpdate(bank, optimizer, moves=moves), None
    return None, not_used("Kernels for updates", reason)


def check(optimizer: Optimizer, rule: AveragingRule, device: torch.device, precision: Precision, moves: bool) -> None:
    """Raise KernelError unless rounds of three learners, one of them gated, do what the reference does.

    Blocks the host.
    """
    for averaging in ROUNDS:
        run = partial(_checked_round, optimizer, averaging, device, precision, moves)
        *found, counts, gates = repeated("updates", run)
        bank, reference = _bank_to_check(optimizer, device, precision), TorchUpdate(optimizer, rule)
        norms = [reference.gradient_norm(bank.trained_row(learner)) for learner in range(NUM_LEARNERS)]
        steps = [None if j == 1 else Step(0.1, 3, optimizer.gradient_scale(norm)) for j, norm in enumerate(norms)]
        round_by_row(reference, bank, averaging, steps)
        same = are_close(found, written_values(bank))
        require(same, "the update kernel's results differ from those of the torch operators")
        same = (counts.tolist(), gates.tolist()) == ([3.0, 2.0, 3.0], [1.0, 0.0, 1.0])
        require(same, "the update kernel's gate differs from the reference's")


def _bank_to_check(optimizer: Optimizer, device: torch.device, precision: Precision) -> ReplicaBank:
    bank = random_bank(optimizer, device, precision, least=0.1)  # away from division by zero
    for learner in range(NUM_LEARNERS):
        bank.refresh_shadow(learner)
    return bank


def _checked_round(
    optimizer: Optimizer, averaging: LinearRound | None, device: torch.device, precision: Precision, moves: bool
) -> list[Tensor]:
    """Return what a round of kernels writes, the step counts and the gates."""
    bank = _bank_to_check(optimizer, device, precision)
    results = torch.tensor([[0.5, 0.0], [torch.nan, 0.0], [2.0, 0.0]], dtype=torch.float64, device=device)
    rates, counts = (torch.full((NUM_LEARNERS,), at, dtype=torch.float64, device=device) for at in (0.1, 2.0))
    update = KernelUpdate(bank, optimizer, moves=moves)
    update.correct(averaging, results=results, loss_column=0, finite_column=1, learning_rates=rates, step_counts=counts)
    if averaging is not None and not moves:
        bank.total.storage.mul_(averaging.share)
        update.move(averaging)
    return [*written_values(bank), counts, results[:, 1]]
