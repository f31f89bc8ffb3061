"""The interface of averaging rules: what is averaged in a round, with which coefficients, and who waits for whom.

For every round a rule gives one of two things, or nothing. With K learners on all devices:

`LinearRound`: as they step, learners are pulled towards z, which moves while they learn on; only the next pull waits
for that. z moves by the sum of the pulls or, if it `follows_learners`, of their new distances from it; without
`moves_z` learners are pulled to a z that stays::

    c_j  ← correction · (w_j − z)                 per learner, from the weights before its gradient step
    w_j  ← (gradient step of w_j) − c_j
    s    ← share · Σ_j c_j  or  share · Σ_j (w_j − z)
                                                  summed on the device in learner order, then one all-reduce of [P]
    z'   ← z + s + momentum · (z − z_prev)        on every device; z_prev ← z

`OuterStep`: after their steps learners wait for each other; z moves to their mean or beyond it, and they to z::

    d    ← Σ_j (w_j − z) / K                      likewise
    v    ← decay · v + intake · d                 the velocity of z
    z'   ← z + along_mean · d + along_velocity · v
    w_j  ← w_j + pull · (z' − w_j)

A rule may also have a `GradientMean`, in every round: before they step, learners exchange their gradients for the mean
of their group's. If all learners are one group, replicas stay equal, and z is any of them::

    g_j  ← Σ_i g_i / n                            over the n learners i of j's group; then the learner's own step

With a `node_period` H > 1 the rounds of a `LinearRound` are done by each node for itself, K and the sum being the
node's, and in every H-th of them

    z ← mean of z over nodes; z_prev ← mean of z_prev over nodes

A rule whose pull is not linear in (w, z) overrides `corrections` and `average`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from crossbow_py.core.settings import Settings

LearnerMomentum = Literal["reset", "keep", "average"]


@dataclass(frozen=True)
class Stage:
    """The state of training when a round is planned.

    Attributes:
        round_index: the index of the round, from 0.
        num_learners: K on all devices that average together.
        learning_rate: γ of the first learner in this round.
        factor: γ divided by the largest γ of the schedule, in [0, 1].
        rounds_apart: the number of rounds, including this one, since learners last averaged.
        first_rate: γ in the first of these rounds, as it would be without warm-up.
        is_last: whether the run ends after this round, as far as is known.
        num_devices: the number of devices that average together.
    """

    round_index: int
    num_learners: int
    learning_rate: float = 0.0
    factor: float = 1.0
    rounds_apart: int = 1
    num_devices: int = 1
    first_rate: float = math.inf
    is_last: bool = False


@dataclass(frozen=True)
class LinearRound:
    """The coefficients of a round in which learners are pulled towards z as they step."""

    correction: float
    momentum: float = 0.0
    share: float = 1.0
    follows_learners: bool = False
    moves_z: bool = True


@dataclass(frozen=True)
class OuterStep:
    """The coefficients of a round that ends in an outer step, and what this does to the learners' optimizer state."""

    decay: float = 0.0
    intake: float = 0.0
    along_velocity: float = 0.0
    along_mean: float = 1.0
    pull: float = 1.0
    learner_momentum: LearnerMomentum = "keep"


RoundAveraging = LinearRound | OuterStep


@dataclass(frozen=True)
class GradientMean:
    """The groups of learners that average their gradients.

    Attributes:
        group_size: the most learners of a device in a group, which are neighbours; None is one group of all learners
            on all devices.
    """

    group_size: int | None = None

    def groups(self, num_learners: int) -> list[range]:
        """Return the learners of a device in as few groups as possible, of sizes as even as possible."""
        number = 1 if self.group_size is None else -(-num_learners // self.group_size)
        bounds = [index * num_learners // number for index in range(number + 1)]
        return [range(first, end) for first, end in pairwise(bounds)]

    def num_groups(self, num_learners: int, num_devices: int) -> int:
        """Return the number of groups on all devices, with `num_learners` on each."""
        return 1 if self.group_size is None else num_devices * len(self.groups(num_learners))

    def has_effect(self, num_learners: int, num_devices: int) -> bool:
        """Return whether any two learners share a group, with `num_learners` on each device."""
        return self.num_groups(num_learners, num_devices) < num_learners * num_devices


class AveragingRule(Settings, ABC):
    """The base of all rules: frozen settings and no state, as z, z_prev and the velocity of z belong to the bank."""

    GROUP: ClassVar[str] = "averaging"
    NAME: ClassVar[str]
    has_central_model: ClassVar[bool]  # if so, learners divide an epoch's samples among themselves
    has_velocity: ClassVar[bool] = False  # whether outer steps use one
    shows_mean: ClassVar[bool] = False  # whether the learners' mean is evaluated, not the z of the last averaging
    LACKS: ClassVar[Mapping[str, str]] = {}  # settings of other rules that it does not have, and the reason
    TO_COMPARE: ClassVar[str] = "choose averaging=sma or averaging=synchronous_sgd"  # so that gradients are compared
    averaging_period: int = 1
    node_period: int = 1  # beyond 1, nodes average for themselves and z differs between them
    restart_on_drop: bool = False
    restart_momentum: LearnerMomentum = "reset"
    batch_norm: str = "mean"
    recalibration_batches: int = 0
    average_ema: float | None = None  # horizon in epochs of the EMA that is evaluated and saved in place of z

    @property
    def needs_end(self) -> bool:
        """Return whether rounds depend on when the run ends, so that the run must have a planned end."""
        return False

    @property
    def is_linear(self) -> bool:
        """Return whether `corrections` and `average` are not overridden: native code and kernels compute them."""
        own = type(self)
        return own.corrections is AveragingRule.corrections and own.average is AveragingRule.average

    @property
    def gradient_mean(self) -> GradientMean | None:
        """The groups that average gradients in every round, or None."""
        return None

    @abstractmethod
    def round(self, stage: Stage) -> RoundAveraging | None:
        """Return what is averaged in this round, or None."""

    def linear_round(self, num_learners: int) -> LinearRound | None:
        """Return the coefficients of the first round that averages linearly; None if the rule has no such."""
        # One learner on each device, so that no gradient group makes all of them equal.
        first = self.round(
            Stage(self.averaging_period - 1, num_learners, rounds_apart=self.averaging_period, num_devices=num_learners)
        )
        return first if isinstance(first, LinearRound) else None

    @property
    def pulls_apart(self) -> bool:
        """Return whether learners that differ, or groups of them, are pulled to z as they step."""
        mean = self.gradient_mean
        return self.linear_round(2) is not None and (mean is None or mean.group_size is not None)

    @property
    def compares_gradients(self) -> bool:
        """Return whether learners are near enough that their gradients differ by noise, which may then be measured."""
        return False

    @property
    def scales_by_gain(self) -> bool:
        """Return whether `rate_scale` follows the gain, which has gradients compared."""
        return False

    def rate_scale(self, num_learners: int, gain: float = 1.0) -> float:
        """Return the factor of the learning rate for K learners on all devices.

        `gain` is how many rounds of one learner a round of theirs is worth, see `engine/goodput.py`.
        """
        return 1.0

    def restarts(self, num_learners: int, num_devices: int) -> bool:
        """Return whether K learners on all devices restart from z when a step schedule drops the learning rate."""
        return self.restart_on_drop and num_learners > 1

    def joins_nodes(self, round_index: int) -> bool:
        """Return whether nodes, each with its own z, average z among them after this round, which averages."""
        return False

    def corrections(self, out: list[Tensor], weights: list[Tensor], z: list[Tensor], coefficients: LinearRound) -> None:
        """Write c_j = correction · (w_j − z) of one learner to `out`; all are lists of matching vectors."""
        torch._foreach_copy_(out, weights)
        torch._foreach_sub_(out, z)
        torch._foreach_mul_(out, coefficients.correction)

    def average(
        self, z: list[Tensor], z_prev: list[Tensor], total: list[Tensor], coefficients: LinearRound
    ) -> None:
        """Move z in place by `total`, the s above, all-reduced; z_prev becomes the old z."""
        step = list(torch._foreach_sub(z, z_prev))
        torch._foreach_mul_(step, coefficients.momentum)
        torch._foreach_add_(step, total)
        torch._foreach_copy_(z_prev, z)
        torch._foreach_add_(z, step)
