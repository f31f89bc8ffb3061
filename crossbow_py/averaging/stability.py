"""Where averaging is stable: z moves by the sum of all pulls, or beyond the learners' mean, and may overshoot.

With K learners that stand still, the distance of z to their mean and the last step of z follow

    | w̄ − z      |     | 1 − α − G   −μ |   | w̄ − z      |
    | z − z_prev |  ←  |     G        μ | · | z − z_prev |        with G = share · K · α

in every round that averages. The powers of this matrix vanish if and only if G < (2 − α)·(1 + μ), which for a share of
1 is α < 2·(1 + μ) / (1 + μ + K); beyond that any difference grows, at any learning rate. If z follows learners, it goes
to their mean, share being 1/K, and settles with any α in (0, 1].

For an outer step, let learners arrive at an optimum between any two steps, and D be its distance from z. In the terms
of `OuterStep`, every step then does

    | D |     | 1 − along_mean − G   −along_velocity · decay |   | D |
    | v |  ←  |      intake                  decay           | · | v |        with G = along_velocity · intake,

which settles if and only if G < (2 − along_mean)·(1 + decay): for DiLoCo η < 2·(1 + β) / (1 + 2·β), for SlowMo
a < 2·(1 + β). Where learners get only part of the way between, a larger step may still settle.
"""

from __future__ import annotations

import math

from crossbow_py.averaging.rule import AveragingRule, LinearRound, OuterStep, Stage
from crossbow_py.core.errors import UserError


def settles(rule: AveragingRule, num_learners: int, num_devices: int = 1) -> bool:
    """Return whether a rule's pull is stable with `num_learners` on each of `num_devices` that average together."""
    total, period = num_learners * num_devices, rule.averaging_period
    found = rule.round(Stage(period - 1, total, rounds_apart=period, num_devices=num_devices))
    if not isinstance(found, LinearRound) or found.follows_learners:
        return True
    return found.share * total * found.correction < (2 - found.correction) * (1 + found.momentum)


def outer_margin(rule: AveragingRule) -> float:
    """Return how many times as large a rule's outer step could be before it is unstable; infinity without one."""
    period = rule.averaging_period
    step = rule.round(Stage(period - 1, 1, learning_rate=1.0, rounds_apart=period))
    if not isinstance(step, OuterStep):
        return math.inf
    return 2 * (1 + step.decay) / (step.along_velocity * step.intake + step.along_mean * (1 + step.decay))


def most_stable_learners(rule: AveragingRule, most_learners: int, num_devices: int = 1) -> int:
    """Return the largest number of learners on each device, from 1 to `most_learners`, with which a rule is stable."""
    return next((k for k in range(most_learners, 1, -1) if settles(rule, k, num_devices)), 1)


def check_settles(rule: AveragingRule, num_learners: int | None, num_devices: int = 1) -> None:
    """Check that a rule is stable with `num_learners` on each device; None is for a tuner, which obeys this.

    Raises UserError if it is not.
    """
    if num_learners is not None and not settles(rule, num_learners, num_devices):
        most = most_stable_learners(rule, num_learners, num_devices)
        devices = f" on each of {num_devices} devices" if num_devices > 1 else ""
        rate = getattr(rule, "correction_rate", None)
        found = f"averaging.correction_rate={rate} is too large for {num_learners} learners{devices}"
        stable = f"with more than {'one learner' if most == 1 else f'{most} learners'} the average model diverges"
        raise UserError(f"{found}: {stable}; take a smaller rate or fewer learners.")
