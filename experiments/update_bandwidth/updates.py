"""The update of a whole bank as a fused round makes it, ready to be called again and again, and the bytes it moves.

It is what a round does once its gradients are there: the pass over them that decides who is gated, then gradient steps
with momentum and weight decay, corrections, and the step of z. Bytes a trained value are counted by hand, for K
learners in float32:

    gate     4·K                          g read
    update   20·K + 16                    g read, w and u read and written; z and z_prev read and written once for all
             + 2·K with a bf16 shadow     written
             + 4 on a CPU                 the sum of corrections written; kernels leave sums of its squares instead

so 116 for four learners in float32 on a CPU. What a line costs that is read only because it is about to be written is
not counted, for a copy no more than for the update, where it concerns the sum of corrections and the shadow alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from crossbow_py.averaging import SMA
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.update.kernel_update import choose_kernel_update
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.models import MODELS
from experiments.bench.sides.captured import graph_of

_OPTIMIZER = SGD(learning_rate=0.01, momentum=0.9, weight_decay=1e-4)
_RULE = SMA()
_LEARNING_RATE = 0.01
# Images and classes of the data set a model is made for; CIFAR's for the others.
_DATA = {"mlp": ((1, 28, 28), 10), "lenet": ((1, 28, 28), 10)}
_CIFAR = ((3, 32, 32), 10)


@dataclass(frozen=True)
class Part:
    """Work that is timed by itself, and the bytes it moves."""

    name: str
    run: Callable[[], object]
    num_bytes: int


def make_bank(model: str, num_learners: int, device: torch.device, precision: Precision) -> ReplicaBank:
    """Make a bank in the order of executor=fused, with gradients like those of training."""
    template = MODELS[model]().build(*_DATA.get(model, _CIFAR))
    bank = ReplicaBank(
        template, num_learners, device=device, precision=precision, state_names=_OPTIMIZER.state_names, order="blocks"
    )
    bank.gradients.storage.normal_(std=1e-3, generator=torch.Generator(device).manual_seed(0))
    return bank


def num_values(bank: ReplicaBank) -> int:
    return bank.layout.num_values


def gate_bytes(num_learners: int) -> int:
    """A trained value; see the module's first lines."""
    return 4 * num_learners


def update_bytes(num_learners: int, *, averages: bool, has_shadow: bool, writes_sum: bool) -> int:
    """A trained value; see the module's first lines. Without averaging z stays where it is."""
    own = (22 if has_shadow else 20) * num_learners
    return own + (16 + (4 if writes_sum else 0) if averages else 0)


def host_parts(bank: ReplicaBank) -> tuple[Part, ...]:
    """The update of a fused round on a CPU, in its two parts. Raises UserError where there is no native code."""
    update, note = choose_update(_OPTIMIZER, _RULE, bank.device, bank.precision.master)
    if not isinstance(update, NativeUpdate):
        raise UserError(note or "the update has no native code for this device; set device=cpu.")
    k, rows, averaging = bank.num_learners, StackedRows(bank), _RULE.linear_round(bank.num_learners)
    count, steps = num_values(bank), [Step(_LEARNING_RATE, step_count=1)] * k
    moved = update_bytes(k, averages=averaging is not None, has_shadow=bank.precision.has_shadow, writes_sum=True)
    return (
        Part("gate", lambda: update.gradient_norms(rows), count * gate_bytes(k)),
        Part("update", lambda: update.correct_all(rows, averaging, steps, moves=True), count * moved),
    )


def device_parts(bank: ReplicaBank, *, captures: bool = True) -> tuple[Part, ...]:
    """The update of a fused round by Triton kernels, the gate within: a CUDA graph of it, or launched anew each time.

    Enqueued on the current stream. Raises UserError where there are no kernels.
    """
    update, note = choose_kernel_update(bank, _OPTIMIZER, _RULE, moves=True)
    if update is None:
        raise UserError(note or "the update has no kernels for this device; set device=cpu.")
    k, averaging = bank.num_learners, _RULE.linear_round(bank.num_learners)
    results, rates, counts = (torch.ones(shape, dtype=torch.float64, device=bank.device) for shape in ((k, 2), k, k))
    rates.fill_(_LEARNING_RATE)

    def run() -> None:
        update.correct(
            averaging, results=results, loss_column=0, finite_column=1, learning_rates=rates, step_counts=counts
        )

    moved = update_bytes(k, averages=averaging is not None, has_shadow=bank.precision.has_shadow, writes_sum=False)
    num_bytes = num_values(bank) * (gate_bytes(k) + moved)
    return (Part("gate and update", graph_of(run) if captures else run, num_bytes),)
