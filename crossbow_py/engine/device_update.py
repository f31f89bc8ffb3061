"""A learner's correction on the device alone: gate, clipping, optimizer step and pull, without a word from the host.

What `TorchUpdate` and `RoundTasks.correct` do between them, for executors whose host must not wait: whatever changes
from round to round (learning rate, step count, whether the gate is open) is a 0-dim tensor on the device, so that the
same launches serve every round and a CUDA graph of them stays good.

The gate. Operators propose new weights and state beside the old ones, and one of the two is kept, to the bit. Numbers
cannot do that, as NaN times 0 is NaN; so both are taken as integers and multiplied by 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.engine.optimizers import SGD, AdamW, Optimizer, for_learner
from crossbow_py.engine.replicas import TrainedRow
from crossbow_py.errors import UserError

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Proposal:
    """New weights, and those state rows that change, beside a learner's own; side by side with its vectors."""

    weights: list[Tensor]
    state: dict[str, list[Tensor]]


@dataclass(frozen=True)
class StepValues:
    """What one step needs besides the row: 0-dim float64 tensors on the device. `step_count` is from 1."""

    learning_rate: Tensor
    step_count: Tensor


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Of all vectors together, 0-dim float64, summed as `TorchUpdate.gradient_norm` does. On the current stream."""
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().sqrt()


def keep_bits(vectors: list[Tensor], gate: Tensor) -> None:
    """Leave vectors as they are where the 0-dim bool `gate` is true, else set them to zero, whatever they hold."""
    integer = _INTEGERS[vectors[0].dtype]
    torch._foreach_mul_([vector.view(integer) for vector in vectors], gate.to(integer))


def select_bits(old: list[Tensor], new: list[Tensor], gate: Tensor) -> None:
    """Old ← new where the 0-dim bool `gate` is true, else unchanged to the bit. `new` is scratch afterwards."""
    integer = _INTEGERS[old[0].dtype]
    old_bits, new_bits = ([vector.view(integer) for vector in vectors] for vectors in (old, new))
    opened = gate.to(integer)
    torch._foreach_mul_(new_bits, opened)
    torch._foreach_mul_(old_bits, 1 - opened)
    torch._foreach_add_(old_bits, new_bits)


class DeviceUpdate:
    """Gated corrections for SGD and AdamW, and every averaging rule whose operators do not make the host wait.

    Raises UserError for another optimizer.
    """

    def __init__(self, optimizer: Optimizer, rule: AveragingRule, device: torch.device) -> None:
        if type(optimizer) not in _PROPOSALS:
            raise UserError(
                f"executor=streams knows the optimizers {' and '.join(known.NAME for known in _PROPOSALS)}, got "
                f"optimizer={optimizer.NAME}; set executor=serial."
            )
        self.optimizer, self.rule = optimizer, rule
        self._propose = _PROPOSALS[type(optimizer)]
        self._one = torch.ones((), dtype=torch.float64, device=device)

    def correct(
        self,
        learner: int,
        row: TrainedRow,
        averaging: LinearRound | None,
        *,
        loss: Tensor,
        learning_rate: Tensor,
        step_count: Tensor,
        finite: Tensor,
    ) -> None:
        """As `RoundTasks.correct`. Enqueued on the current stream; records nothing, the host does not wait.

        A learner whose loss or gradient norm is not finite keeps weights and state to the bit, and its corrections
        are zero.

        Args:
            learner: whose hyper-parameters.
            row: its vectors; gradients are scratch afterwards.
            averaging: coefficients of the round, constants of a graph; None writes no corrections.
            loss: of the batch the gradients are from, 0-dim.
            learning_rate: γ, 0-dim float64.
            step_count: steps taken so far, 0-dim float64; one more afterwards unless the gate is shut.
            finite: 0-dim; 1 afterwards, or 0 when the gate is shut.
        """
        norm = gradient_norm(row.gradients)
        gate = torch.isfinite(norm) & torch.isfinite(loss)
        if self.optimizer.clip_norm is not None:
            scale = torch.where(norm > self.optimizer.clip_norm, self.optimizer.clip_norm / (norm + 1e-6), self._one)
            torch._foreach_mul_(row.gradients, scale.to(row.gradients[0].dtype))
        if averaging:
            self.rule.corrections(row.corrections, row.weights, row.z, averaging)
        proposal = self._propose(self.optimizer, learner, row, StepValues(learning_rate, step_count + 1))
        if averaging:
            torch._foreach_sub_(proposal.weights, row.corrections)
        keep_bits(row.corrections, gate)
        old, new = list(row.weights), list(proposal.weights)
        for name, vectors in proposal.state.items():
            old += row.state[name]
            new += vectors
        select_bits(old, new, gate)
        if row.shadow is not None:
            torch._foreach_copy_(row.shadow, row.weights)
        step_count.add_(gate)
        finite.copy_(gate)


def _num_decayed(optimizer: Optimizer, row: TrainedRow) -> int:
    return len(row.weights) if optimizer.decay_norm_and_bias else row.num_decayed


def propose_sgd(optimizer: SGD, learner: int, row: TrainedRow, values: StepValues) -> Proposal:
    """The class equation of SGD."""
    momentum, decay = for_learner(optimizer.momentum, learner), optimizer.decay(learner)
    gradients, count = row.gradients, _num_decayed(optimizer, row)
    if decay and count:
        torch._foreach_add_(gradients[:count], row.weights[:count], alpha=decay)
    state = {}
    if momentum:
        velocity = list(torch._foreach_mul(row.state["momentum"], momentum))
        torch._foreach_add_(velocity, gradients)
        state["momentum"] = velocity
        gradients = list(torch._foreach_add(gradients, velocity, alpha=momentum)) if optimizer.nesterov else velocity
    steps = torch._foreach_mul(gradients, values.learning_rate.to(gradients[0].dtype))
    return Proposal(list(torch._foreach_sub(row.weights, steps)), state)


def propose_adamw(optimizer: AdamW, learner: int, row: TrainedRow, values: StepValues) -> Proposal:
    """The class equation of AdamW. Factors are worked out in float64: 1 − β2^t has few digits left in float32."""
    beta1, beta2 = for_learner(optimizer.beta1, learner), for_learner(optimizer.beta2, learner)
    decay, count, dtype = optimizer.decay(learner), _num_decayed(optimizer, row), row.weights[0].dtype
    rate, root = values.learning_rate, (1 - beta2**values.step_count).sqrt()
    size = rate / (1 - beta1**values.step_count)
    first = list(torch._foreach_lerp(row.state["exp_avg"], row.gradients, 1 - beta1))
    second = list(torch._foreach_mul(row.state["exp_avg_sq"], beta2))
    torch._foreach_addcmul_(second, row.gradients, row.gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, root.to(dtype))
    torch._foreach_add_(denominators, optimizer.epsilon)
    steps = torch._foreach_div(first, denominators)
    torch._foreach_mul_(steps, size.to(dtype))
    weights = list(row.weights)
    if decay and count:
        weights[:count] = torch._foreach_mul(weights[:count], (1 - rate * decay).to(dtype))
    return Proposal(list(torch._foreach_sub(weights, steps)), {"exp_avg": first, "exp_avg_sq": second})


_PROPOSALS: dict[type[Optimizer], Callable[[Any, int, TrainedRow, StepValues], Proposal]] = {
    SGD: propose_sgd,
    AdamW: propose_adamw,
}
