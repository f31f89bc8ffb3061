"""Warnings about settings that do not fit the length of a run."""

from __future__ import annotations

import math

from crossbow_py.averaging.stability import outer_margin
from crossbow_py.core.errors import UserError
from crossbow_py.engine.goodput import ROUNDS_UNKNOWN
from crossbow_py.train.run import Run
from crossbow_py.train.schedules import seesaw_learners

_NO_END = 10**15  # samples
_SHORT = 4  # times as long as the gain is unknown: in shorter runs that is much of them


def remarks_on_length(run: Run, total_samples: int | None) -> list[str]:
    """Return warnings about settings that do not fit a run of that many samples; None if that is not known.

    Raises UserError if the rule needs to know it.
    """
    if run.rule.needs_end and total_samples is None:
        raise UserError(
            "averaging.quadratic_period needs to know the end of the run, where learners average at the latest; "
            "set max_epochs or max_samples."
        )
    remark = None if total_samples is None else run.schedule.remark(total_samples / run.num_samples)
    rounds = math.inf if total_samples is None else -(-total_samples // run.samples_per_round)
    found = [remark] if remark else []
    if run.settings.num_learners == "seesaw":
        found.append(_on_learners(run, total_samples, rounds))
    found += _on_outer_rate(run)
    if (run.rule.has_velocity or not run.bank.is_single) and not run.tuning:
        found += _on_averaging(run, rounds)
    by_gain = run.rule.scales_by_gain or run.settings.count_effective_samples
    if by_gain and not run.bank.is_single and rounds < _SHORT * ROUNDS_UNKNOWN:
        found.append(
            f"AdaScale's gain counts as 1 until it is known, after {ROUNDS_UNKNOWN} rounds, and this run has about "
            f"{rounds:.0f}; set averaging.rate_scaling=sqrt for one so short."
        )
    return found


def _on_learners(run: Run, total_samples: int | None, rounds: float) -> str:
    """Say how many learners come by `num_learners=seesaw`."""
    fewest, most = run.settings.min_learners, run.settings.max_learners
    before_last = _NO_END if total_samples is None else max(0, total_samples - run.samples_per_round)
    lowest = run.schedule.warmed_up_factor(before_last, run.num_samples, total_samples)
    last = seesaw_learners(lowest, fewest, most)
    rule = run.rule
    never_average = rule.gradient_mean is None and not rule.needs_end and rule.averaging_period > rounds
    if run.bank.is_single and never_average:
        return (
            f"num_learners=seesaw stays at 1, as averaging.averaging_period={rule.averaging_period} is longer than "
            f"the run of {rounds} rounds, and more learners would never average; take a smaller one."
        )
    if most == fewest:
        return f"num_learners=seesaw stays at {fewest}, as max_learners={most} allows no more; set a larger one."
    if last == fewest:
        return (
            f"num_learners=seesaw stays at {fewest}, as schedule={run.schedule.NAME} does not halve the rate in this "
            "run; take one that falls further."
        )
    share = "K" if fewest == 1 else f"(K/{fewest})"
    times = share if run.optimizer.noise_power == 1 else f"√{share}"
    return (
        f"Learners come as the schedule lowers the rate, up to K = {last} per device; the rate of K learners is the "
        f"schedule's times {times}."
    )


def _on_outer_rate(run: Run) -> list[str]:
    rule = run.rule
    of = "slow" if hasattr(rule, "slow_learning_rate") else "outer"
    outer_rate, margin = getattr(rule, f"{of}_learning_rate", 0.0), outer_margin(rule)
    if not outer_rate or margin > 1:
        return []
    return [
        f"averaging.{of}_learning_rate={outer_rate:g} is too large with averaging.{of}_momentum="
        f"{getattr(rule, f'{of}_momentum'):g}: where learners settle between two outer steps, the average model "
        f"diverges from {margin * outer_rate:.4g} on; take a smaller averaging.{of}_learning_rate."
    ]


def _on_averaging(run: Run, rounds: float) -> list[str]:
    rule, bank = run.rule, run.bank
    if rule.has_velocity and rule.averaging_period > rounds:
        return [
            f"averaging.averaging_period={rule.averaging_period} is longer than the run of {rounds} rounds, which has "
            "no outer step then; take a smaller one."
        ]
    if bank.replicas_identical:
        size = rule.gradient_mean and rule.gradient_mean.group_size
        one_group = (
            f"averaging.group_size={size} puts all {bank.num_learners} learners into one group: they average "
            "gradients, and no models; take a smaller one for several groups."
        )
        return [] if size is None else [one_group]
    if rule.averaging_period > rounds:
        shown = "evaluations show a mean of models apart" if rule.shows_mean else "the average model is as it began"
        return [
            f"averaging.averaging_period={rule.averaging_period} is longer than the run of {rounds} rounds: "
            f"learners never average, and {shown}; take a smaller one."
        ]
    if rule.node_period > 1 and not run.collective.apart:
        return [f"averaging.node_period={rule.node_period} is for several nodes; with one it does nothing."]
    if run.collective.apart and rule.averaging_period * rule.node_period > rounds:
        return [
            f"averaging.node_period={rule.node_period} is longer than the run of {rounds} rounds: nodes never "
            "join, and evaluations show the mean of what each learned by itself; take a smaller one."
        ]
    return []
