"""Corrections entirely on the device: gate, clipping, optimizer step and pull, without the host.

They do what `TorchUpdate` and `RoundTasks.correct` do together, for executors that must not block the host: values that
change from round to round (learning rate, step count, whether the gate is open) are tensors on the device, so that the
same launches, or a CUDA graph of them, serve every round.

They work on one learner's row, or on the rows of all learners end to end, in as many launches as for one. For all, a
value that differs between learners is a table with one entry for each, spread over the values by their learners.

The gate: operators propose new weights and state beside the old ones, and one of the two is kept, bit for bit.
Multiplying numbers cannot do this, because NaN times 0 is NaN, so both are viewed as integers and multiplied by 0 or 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.layout import DECAYED, Rows, TrainedRow
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon, Optimizer, PerLearner, for_learner
from crossbow_py.engine.update.row_update import write_distances

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

# A factor of vectors: one number (a 0-dim tensor if only the device knows it), or vectors.
Factor = float | Tensor | list[Tensor]


def knows(optimizer: Optimizer) -> bool:
    """Return whether `DeviceUpdate` has the optimizer's step. It has one of all parameters, and none of groups."""
    return type(optimizer) in _PROPOSALS and not optimizer.has_groups


class OneLearner:
    """A learner's row to correct. A round's values for it, and its gradient norm, are 0-dim.

    Attributes:
        row: its vectors; gradients are scratch after a correction.
        matrices: where the matrices are in these vectors.
        num_equal: how many neighbours in `matrices` belong to learners that are always equal.
    """

    def __init__(self, learner: int, row: TrainedRow) -> None:
        self._learner, self.row = learner, row
        self.matrices = row.matrices
        self.num_equal = 1

    def part(self, first: int, end: int) -> OneLearner:
        """Return the same learner with the vectors from `first` to `end`."""
        return OneLearner(self._learner, self.row.part(first, end))

    def setting(self, value: PerLearner) -> float | Tensor:
        """Return a hyper-parameter: a number, or float64 with one entry for each learner."""
        return for_learner(value, self._learner)

    def spread(self, values: float | Tensor) -> Factor:
        """Return a number, or a tensor as from `setting` and in a round's values, as a factor of the row's vectors."""
        return _in_dtype_of(self.row, values) if isinstance(values, Tensor) else values

    def by_matrix(self, values: Tensor) -> Tensor:
        """Return a round's values, one for each of `matrices`."""
        return values.expand(len(self.matrices))

    def gradient_norms(self) -> Tensor:
        """Return the norm of each learner's whole gradient, float64, summed as in `TorchUpdate.gradient_norm`."""
        return torch.stack(torch._foreach_norm(self.row.gradients)).double().square().sum().sqrt()

    def write_corrections(self, rule: AveragingRule, averaging: LinearRound) -> None:
        """Write the rule's corrections for the current weights to C."""
        rule.corrections(self.row.corrections, self.row.weights, self.row.z, averaging)

    def write_distances(self) -> None:
        """Write w − z to C."""
        write_distances(self.row)


class AllLearners:
    """The K active rows of a bank in `blocks`, in one or two vectors for all.

    A round's values are `[K + 1]`: the last entry is for padding and unused rows, which belong to no learner. Their
    gradient norm is infinite, so the gate leaves them unchanged.
    """

    def __init__(self, bank: ReplicaBank, optimizer: Optimizer) -> None:
        self._bank = bank
        self.num_equal = bank.num_learners if bank.replicas_identical else 1
        self.row = TrainedRow(
            weights=bank.weights.end_to_end(),
            gradients=bank.gradients.end_to_end(),
            corrections=bank.corrections.end_to_end(),
            state={name: rows.end_to_end() for name, rows in bank.state.items()},
            z=bank.z.trained(),
            shadow=bank.shadow.end_to_end() if bank.precision.has_shadow else None,
            num_decayed=sum(bank.layout.count(kind) > 0 for kind in DECAYED),
            num_matrices=int(bank.layout.count("matrix") > 0),
        )
        learners, blocks, offsets = range(bank.num_learners), bank.layout.blocks, bank.weights.offsets
        self.matrices = tuple(
            replace(own, vector=0, begin=offsets[own.vector] + learner * blocks[own.vector].numel + own.begin)
            for own in bank.weights.matrices()
            for learner in learners
        )
        owners = Rows(bank.layout, bank.capacity, torch.int32, bank.device, bank.order)
        owners.storage.fill_(bank.num_learners)
        for learner in learners:
            for vector in owners.trained(learner):
                vector.fill_(learner)
        self._owners = owners.end_to_end()
        self._gradients = [vector for learner in learners for vector in bank.gradients.trained(learner)]
        self._norm_of_no_learner = torch.full((1,), torch.inf, dtype=torch.float64, device=bank.device)
        # Made here, because no value may come from the host while a graph is captured.
        given = (getattr(optimizer, name) for name in optimizer.per_learner())
        self._tables = {
            value: torch.tensor([*value, value[-1]], dtype=torch.float64, device=bank.device)
            for value in given
            if isinstance(value, tuple)
        }

    def part(self, first: int, end: int) -> AllLearners:
        """Return the same learners with the vectors from `first` to `end`."""
        found = copy.copy(self)
        found.row, found._owners = self.row.part(first, end), self._owners[first:end]
        return found

    def setting(self, value: PerLearner) -> float | Tensor:
        """Return a hyper-parameter: a number, or a table, which has one entry more."""
        return self._tables[value] if isinstance(value, tuple) else value

    def spread(self, values: float | Tensor) -> float | list[Tensor]:
        """Return a number, or every entry of a tensor beside the values of its learner."""
        if not isinstance(values, Tensor):
            return values
        own = _in_dtype_of(self.row, values)
        return [own.index_select(0, owners) for owners in self._owners]

    def by_matrix(self, values: Tensor) -> Tensor:
        """Return a round's values, one for each of `matrices`."""
        learners = self._bank.num_learners
        return values[:learners].repeat(len(self.matrices) // learners)

    def gradient_norms(self) -> Tensor:
        """Return the norm of each learner's gradient, and infinity, `[K + 1]`."""
        norms = torch.stack(torch._foreach_norm(self._gradients)).view(self._bank.num_learners, -1)
        return torch.cat([norms.double().square().sum(1).sqrt(), self._norm_of_no_learner])

    def write_corrections(self, rule: AveragingRule, averaging: LinearRound) -> None:
        """Write the rule's corrections of all learners to C, one after another, because all read the one row of z."""
        bank = self._bank
        for learner in range(bank.num_learners):
            row = bank.trained_row(learner)
            rule.corrections(row.corrections, row.weights, row.z, averaging)

    def write_distances(self) -> None:
        """Write w − z of all learners to C."""
        for learner in range(self._bank.num_learners):
            write_distances(self._bank.trained_row(learner))


def _in_dtype_of(row: TrainedRow, values: Tensor) -> Tensor:
    return values if values.dtype == torch.bool else values.to(row.weights[0].dtype)


Learners = OneLearner | AllLearners
Proposal = tuple[list[Tensor], dict[str, list[Tensor]]]  # new weights and changed state, vectors that match the row's


def keep_bits(vectors: list[Tensor], gate: Factor) -> None:
    """Keep vectors where the bool `gate` is true, and set them to zero elsewhere, even NaN."""
    integer = _INTEGERS[vectors[0].dtype]
    torch._foreach_mul_([vector.view(integer) for vector in vectors], _as(integer, gate))


def select_bits(old: list[Tensor], new: list[Tensor], gate: Factor) -> None:
    """Set old ← new where the bool `gate` is true, and keep it bit for bit elsewhere. `new` is scratch afterwards."""
    if isinstance(gate, list):
        for kept, given, opened in zip(old, new, gate * (len(old) // len(gate)), strict=True):
            torch.where(opened, given, kept, out=kept)
        return
    integer = _INTEGERS[old[0].dtype]
    old_bits, new_bits = ([vector.view(integer) for vector in vectors] for vectors in (old, new))
    opened = _as(integer, gate)
    torch._foreach_mul_(new_bits, opened)
    torch._foreach_mul_(old_bits, 1 - opened)
    torch._foreach_add_(old_bits, new_bits)


def _as(dtype: torch.dtype, gate: Factor) -> Any:
    if isinstance(gate, list):
        return [part.to(dtype) for part in gate]
    assert isinstance(gate, Tensor), "only the device knows whether a gate is open"
    return gate.to(dtype)


class DeviceUpdate:
    """Gated corrections for SGD, AdamW and Muon, and every averaging rule whose operators do not block the host.

    Raises UserError for other optimizers.
    """

    def __init__(self, optimizer: Optimizer, rule: AveragingRule, device: torch.device) -> None:
        if optimizer.has_groups:
            raise UserError(
                "executor=streams takes one step of all parameters, and optimizer.groups has others for some; set "
                "executor=fused or executor=serial."
            )
        if not knows(optimizer):
            raise UserError(
                f"executor=streams knows the optimizers {', '.join(known.NAME for known in _PROPOSALS)}, got "
                f"optimizer={optimizer.NAME}; set executor=fused or executor=serial."
            )
        self.optimizer, self.rule = optimizer, rule
        self._propose = _PROPOSALS[type(optimizer)]
        self._one = torch.ones((), dtype=torch.float64, device=device)

    def correct(
        self,
        learners: Learners,
        averaging: LinearRound | None,
        *,
        loss: Tensor,
        learning_rate: Tensor,
        step_count: Tensor,
        finite: Tensor,
    ) -> None:
        """Do as `RoundTasks.correct`. Enqueued on the current stream; records no event and does not block the host.

        A learner whose loss or gradient norm is not finite keeps its weights and state bit for bit, and its corrections
        are zero. Tensors are 0-dim for one learner and `[K + 1]` for all.

        Args:
            learners: the rows to correct.
            averaging: the coefficients of the round, constants of a graph; None writes no corrections.
            loss: the losses that the gradients are from.
            learning_rate: γ, float64.
            step_count: the number of steps so far, float64; counted up unless the gate is closed.
            finite: set to 1, or to 0 where the gate is closed.
        """
        row, norms = learners.row, learners.gradient_norms()
        opened = torch.isfinite(norms) & torch.isfinite(loss)
        limit = self.optimizer.clip_norm
        if limit is not None:
            scale: Any = learners.spread(torch.where(norms > limit, limit / (norms + 1e-6), self._one))
            torch._foreach_mul_(row.gradients, scale)
        if isinstance(self.optimizer, Muon) and self.optimizer.normalize_weights:
            matrices = [matrix.of(row.weights) for matrix in learners.matrices]
            self.optimizer.normalize(matrices, learners.by_matrix(opened))
        if averaging:
            learners.write_corrections(self.rule, averaging)
        weights, state = self._propose(self.optimizer, learners, learning_rate, step_count + 1)
        gate = learners.spread(opened)
        if averaging:
            torch._foreach_sub_(weights, row.corrections)
        old, new = list(row.weights), list(weights)
        for name, vectors in state.items():
            old += row.state[name]
            new += vectors
        select_bits(old, new, gate)
        if averaging:
            if averaging.follows_learners:
                learners.write_distances()
            keep_bits(row.corrections, gate)
        if row.shadow is not None:
            torch._foreach_copy_(row.shadow, row.weights)
        step_count.add_(opened)
        finite.copy_(opened)


def _add_scaled(vectors: list[Tensor], others: list[Tensor], factor: Any) -> None:
    """Add factor · others to vectors; the factor is a number on the host, or vectors."""
    if isinstance(factor, list):
        torch._foreach_addcmul_(vectors, others, factor)
    else:
        torch._foreach_add_(vectors, others, alpha=factor)


def _first(factor: Factor, count: int) -> Factor:
    return factor[:count] if isinstance(factor, list) else factor


def propose_sgd(optimizer: SGD, learners: Learners, learning_rate: Tensor, _: Tensor) -> Proposal:
    """Return the step in the docstring of `SGD`."""
    momentum, decay = learners.setting(optimizer.momentum), learners.setting(optimizer.weight_decay)
    row, count = learners.row, optimizer.num_decayed(learners.row)
    gradients = row.gradients
    if (isinstance(decay, Tensor) or decay != 0) and count:
        _add_scaled(gradients[:count], row.weights[:count], _first(learners.spread(decay), count))
    state = {}
    if isinstance(momentum, Tensor) or momentum != 0:
        factor: Any = learners.spread(momentum)
        velocity = list(torch._foreach_mul(row.state["momentum"], factor))
        torch._foreach_add_(velocity, gradients)
        state["momentum"] = velocity
        if optimizer.nesterov:
            _add_scaled(gradients, velocity, factor)
        else:
            gradients = velocity
    rate: Any = learners.spread(learning_rate)
    steps = torch._foreach_mul(gradients, rate)
    return list(torch._foreach_sub(row.weights, steps)), state


def propose_adamw(optimizer: AdamW, learners: Learners, learning_rate: Tensor, step_count: Tensor) -> Proposal:
    """Return the step in the docstring of `AdamW`. Factors are float64: 1 − β2^t has few digits in float32."""
    beta1, beta2 = learners.setting(optimizer.beta1), learners.setting(optimizer.beta2)
    row, decay, count = learners.row, learners.setting(optimizer.weight_decay), optimizer.num_decayed(learners.row)
    root: Any = learners.spread((1 - beta2**step_count).sqrt())
    size: Any = learners.spread(learning_rate / (1 - beta1**step_count))
    new1: Any = learners.spread(1 - beta1)
    kept2: Any = learners.spread(beta2)
    first = list(torch._foreach_lerp(row.state["exp_avg"], row.gradients, new1))
    second = list(torch._foreach_mul(row.state["exp_avg_sq"], kept2))
    new2: Any = learners.spread(1 - beta2)
    if isinstance(new2, list):
        torch._foreach_addcmul_(second, torch._foreach_mul(row.gradients, new2), row.gradients)
    else:
        torch._foreach_addcmul_(second, row.gradients, row.gradients, new2)
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, root)
    torch._foreach_add_(denominators, optimizer.epsilon)
    steps = torch._foreach_div(first, denominators)
    torch._foreach_mul_(steps, size)
    weights = list(row.weights)
    if (isinstance(decay, Tensor) or decay != 0) and count:
        shrunk: Any = _first(learners.spread(1 - learning_rate * decay), count)
        weights[:count] = torch._foreach_mul(weights[:count], shrunk)
    return list(torch._foreach_sub(weights, steps)), {"exp_avg": first, "exp_avg_sq": second}


def propose_muon(optimizer: Muon, learners: Learners, learning_rate: Tensor, step_count: Tensor) -> Proposal:
    """Return the step in the docstring of `Muon`."""
    row, count = learners.row, learners.row.num_matrices
    matrices, others = learners.part(0, count), learners.part(count, len(row.weights))
    momentum: Any = matrices.spread(matrices.setting(optimizer.momentum))
    velocity = list(torch._foreach_mul(matrices.row.state["momentum"], momentum))
    torch._foreach_add_(velocity, matrices.row.gradients)
    if optimizer.nesterov:
        _add_scaled(matrices.row.gradients, velocity, momentum)
    given = matrices.row.gradients if optimizer.nesterov else velocity
    # Where learners share a gradient and so are equal, the first one's matrices do for all; others follow it.
    k = learners.num_equal
    optimizer.orthogonalize([(matrix, given, row.gradients) for matrix in learners.matrices[::k]])
    for index, matrix in enumerate(learners.matrices):
        if index % k:
            matrix.of(row.gradients).copy_(learners.matrices[index - index % k].of(row.gradients))
    weights, _ = propose_sgd(optimizer.plain, matrices, learning_rate, step_count)
    state = {"momentum": velocity}
    if others.row.weights:
        scheduled = learning_rate / learners.setting(optimizer.learning_rate)
        rates = scheduled * learners.setting(optimizer.other_learning_rate)
        before = others.row.state
        others.row = optimizer.row_of_others(others.row)
        moved, own = _PROPOSALS[type(optimizer.others)](optimizer.others, others, rates, step_count)
        weights += moved
        # Proposals are scratch, so that what does not change is copied.
        for name, theirs in zip(before, optimizer.others.STATE, strict=True):
            changed = state.get(name) or [each.clone() for each in matrices.row.state[name]]
            state[name] = changed + (own.get(theirs) or [each.clone() for each in before[name]])
    return weights, state


_PROPOSALS: dict[type[Optimizer], Callable[[Any, Learners, Tensor, Tensor], Proposal]] = {
    SGD: propose_sgd,
    AdamW: propose_adamw,
    Muon: propose_muon,
}
