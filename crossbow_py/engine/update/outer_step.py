"""The outer step: z moves to the learners' mean or beyond it, and the learners to z, when no task is in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from crossbow_py.averaging.rule import OuterStep
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.layout import Rows
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.host import intra_op_threads

# For fewer values, over all learners, more threads save no time, and cost some if another program uses a core.
_OF_ONE_THREAD = 2**20


@torch.no_grad()
def take_outer_step(
    bank: ReplicaBank,
    step: OuterStep,
    collective: Collective,
    add: Callable[[Tensor], None] | None = None,
    *,
    without: Collection[int] = (),
    adds: bool = True,
) -> None:
    """Take the step of `OuterStep` (averaging/rule.py) on a drained bank; all devices do so together.

    Afterwards `bank.total` is d, the mean over all devices' learners of w_j − z, summed in learner order.

    Args:
        bank: the learners.
        step: the coefficients.
        collective: sums over devices.
        add: sums a vector over devices in place, to average optimizer state.
        without: learners of this device that add nothing to the means, as if they were z and had no state. Of equal
            replicas any is the mean, also if all of them are named: other devices had gradients then.
        adds: whether this device's learners count; if not, all are as in `without`.
    """
    few = bank.num_learners * bank.layout.num_values <= _OF_ONE_THREAD
    with intra_op_threads(1 if few else torch.get_num_threads()):
        bank.total_squares = None  # `total` is written
        _write_mean_difference(bank.total, bank, collective, without, adds)
        z, total = bank.z.trained(), bank.total.trained()
        move = list(torch._foreach_mul(total, step.along_mean))
        if bank.velocity is not None:
            velocity = bank.velocity.trained()
            torch._foreach_mul_(velocity, step.decay)
            torch._foreach_add_(velocity, total, alpha=step.intake)
            torch._foreach_add_(move, velocity, alpha=step.along_velocity)
        bank.z_prev.copy_row(0, bank.z)
        torch._foreach_add_(z, move)
        for learner in range(1 if bank.one_row else bank.num_learners):
            weights = bank.weights.trained(learner)
            if step.pull == 1:
                torch._foreach_copy_(weights, z)  # w becomes z bit for bit
            elif step.pull:
                torch._foreach_lerp_(weights, z, step.pull)
            bank.refresh_shadow(learner)
        bank.settle_state(step.learner_momentum, add, without if adds else range(bank.num_learners))


@torch.no_grad()
def mean_of_learners(bank: ReplicaBank, collective: Collective, without: Collection[int] = ()) -> Rows:
    """Return the mean of all devices' learners as a new row; drained, and all devices together.

    It equals z bit for bit where the learners do. For `without` see `take_outer_step`; values that are not trained are
    those of z.
    """
    mean = bank.new_flat()
    _write_mean_difference(mean, bank, collective, without)
    mean.storage.add_(bank.z.storage)
    return mean


@torch.no_grad()
def bring_up_to_date(bank: ReplicaBank, collective: Collective, without: Collection[int] = ()) -> None:
    """Set z ← `mean_of_learners`, in place; `bank.total` becomes scratch."""
    bank.total_squares = None
    _write_mean_difference(bank.total, bank, collective, without)
    torch._foreach_add_(bank.z.trained(), bank.total.trained())


def _write_mean_difference(
    out: Rows, bank: ReplicaBank, collective: Collective, without: Collection[int], adds: bool = True
) -> None:
    """Write the mean over all devices' learners of w_j − z, see `take_outer_step`, to the trained values of `out`."""
    z, mean, counted = bank.z.trained(), out.trained(), range(bank.num_learners if adds else 0)
    if adds and bank.replicas_identical:
        counted, without = range(1), ()
    torch._foreach_zero_(mean)
    for learner in counted:
        if learner not in without:
            torch._foreach_add_(mean, torch._foreach_sub(bank.weights.trained(learner), z))
    collective.all_reduce_sum(out.storage)
    torch._foreach_div_(mean, float((1 if bank.replicas_identical else bank.num_learners) * collective.num_devices))
