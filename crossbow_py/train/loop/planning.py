"""Plans rounds: pure functions of a run, which they do not change."""

from __future__ import annotations

from crossbow_py.averaging import Stage
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.engine.goodput import compares_in
from crossbow_py.engine.rounds import Round
from crossbow_py.engine.update.optimizers import for_learner
from crossbow_py.train.run import Run
from crossbow_py.train.schedules import seesaw_learners


def batch_starts(run: Run, cursor: int) -> tuple[int, ...]:
    """Return where the batches of this device's learners begin in the sample stream, in a round from `cursor`."""
    if not run.rule.has_central_model:  # independent learners share every batch
        return (cursor,) * run.bank.num_learners
    size = run.train_feed.batch_size
    first = cursor + run.bank.first_learner * size
    return tuple(range(first, first + run.bank.num_learners * size, size))


def next_round(run: Run, total_samples: int | None) -> Round:
    """Plan the next round of a run that ends at `total_samples`; None if that is not known."""
    state, now = run.state, (run.progress, run.num_samples, total_samples)
    is_last = total_samples is not None and run.progress + run.samples_per_round >= total_samples
    apart = state.apart(run.schedule.warmed_up_factor(*now))
    return plan_round(run, state.round_index, state.samples_seen, run.schedule.factor(*now), *apart, is_last)


def seesaw_decision(run: Run, total_samples: int | None) -> Decision | None:
    """Return the other number of learners that the next round is to have by `num_learners=seesaw`; None for the same.

    More learners wait until those that differ, or a z with a velocity, have averaged, as growing ends their period.
    None come that would not average with the others before the run ends, as z does not move until they do.
    """
    settings, state, now = run.settings, run.state, run.bank.num_learners
    if settings.num_learners != "seesaw":
        return None
    factor = run.schedule.warmed_up_factor(run.progress, run.num_samples, total_samples)
    count = seesaw_learners(factor, settings.min_learners, settings.max_learners)
    averaged = run.bank.z_is_learner or state.apart_since == state.round_index
    if count == now or (count > now and not averaged):
        return None
    if count > now and run.rule.gradient_mean is None and not run.rule.needs_end and total_samples is not None:
        rounds_left = (total_samples - run.progress) // (run.samples_per_round // now * count)
        if run.rule.averaging_period > rounds_left:
            return None
    reason = f"the schedule's rate is {factor:.3g} of its largest"
    if count == settings.max_learners < now:
        reason = f"max_learners={settings.max_learners}"
    said = f"{now} → {count} learners: {reason}."
    return Decision("grow" if count > now else "shrink", count, said, "seesaw")


def plan_round(
    run: Run,
    index: int,
    cursor: int,
    factor: float,
    rounds_apart: int = 1,
    first_factor: float = 1.0,
    is_last: bool = False,
) -> Round:
    """Plan round `index` from stream position `cursor`: the batch and learning rate of each learner.

    For `factor`, `rounds_apart` and `is_last` see `Stage`; `first_factor` is that of the first round apart.
    """
    learners, devices = range(run.bank.num_learners), run.collective.num_devices
    noise, total = run.state.noise, run.bank.total_learners
    scale = run.rule.rate_scale(total, 1.0 if noise is None else noise.gain(total))
    if run.settings.num_learners == "seesaw":
        power, fewest = run.optimizer.noise_power or 0.0, run.settings.min_learners
        scale = run.rule.rate_scale(fewest * devices) * (len(learners) / fewest) ** power
    rates = tuple(for_learner(run.optimizer.learning_rate, j) * (factor * scale) for j in learners)
    first = for_learner(run.optimizer.learning_rate, 0) * (first_factor * scale)
    stage = Stage(index, len(learners) * devices, rates[0], factor, rounds_apart, devices, first, is_last)
    return Round(
        index=index,
        starts=batch_starts(run, cursor),
        learning_rates=rates,
        together=run.rule.round(stage),
        joins_nodes=run.collective.apart and run.rule.joins_nodes(index),
        compares=len(learners) > 1 and _compares(run, index),
    )


def compares_alone(run: Run, plan: Round) -> bool:
    """Return whether the gradients of a device's only learner are compared before a round."""
    return len(plan.starts) == 1 and _compares(run, plan.index)


def _compares(run: Run, index: int) -> bool:
    noise = run.state.noise
    return noise is not None and compares_in(index, run.bank.num_learners, noise.count)
