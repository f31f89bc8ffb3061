"""The learning-rate range test (Smith 2017, "Cyclical learning rates for training neural networks", section 3.3).

A copy of the run trains while the learning rate rises exponentially from round to round. Where the loss falls fastest,
a rate is large enough to learn and far from where training diverges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crossbow_py.core.errors import UserError
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.engine.update.optimizers import Optimizer, PerLearner, for_learner
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.telemetry.pictures.files import INSTALL_MATPLOTLIB, has_matplotlib, save_picture
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.checks.losses import copied_loss
from crossbow_py.train.loop.learners import Learners
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter
from crossbow_py.train.tuning.executor_choice import new_bank

FEWEST_ROUNDS = 10
_SMOOTHING = 0.9  # of the losses, which are of single batches
_DIVERGED = 4.0  # times the lowest smoothed loss, from which on nothing is learned
_FLAT = 1e-6  # a relative fall by rounding alone
_UNSTEADY = 10  # one in so many rounds, the first ones, says too little


@dataclass(frozen=True)
class LearningRateTest:
    """The result of `Trainer.find_learning_rate`.

    Attributes:
        learning_rates: the first learner's `optimizer.learning_rate` in each round; the averaging rule may scale it.
        losses: the mean training loss of the learners in each round.
        suggested: the rate at which the loss fell fastest; None if it never fell.
        optimizer: the run's optimizer with that rate, and with its other rates in proportion; as it is without one.
        diverged: whether the loss grew so much that the test ended early.
    """

    learning_rates: list[float]
    losses: list[float]
    suggested: float | None
    optimizer: Optimizer
    diverged: bool

    @property
    def sentence(self) -> str:
        """The result, as a sentence for the user."""
        end = "where it diverged" if self.diverged else "without diverging"
        tried = f"{len(self.losses)} rounds from {self.learning_rates[0]:.3g} to {self.learning_rates[-1]:.3g}, {end}"
        if self.suggested is None:
            return f"The loss never fell in {tried}: no learning rate can be suggested."
        rates = [f"optimizer.{name}={_shown(getattr(self.optimizer, name))}" for name in _rates_of(self.optimizer)]
        return f"The loss fell fastest with {' '.join(rates)} ({tried})."

    def draw(self, path: str | Path) -> None:
        """Draw losses over learning rates into a PNG. Raises UserError without matplotlib, OSError if it fails."""
        if not has_matplotlib():
            raise UserError(f"no picture of the learning rates: {INSTALL_MATPLOTLIB}")
        from matplotlib.figure import Figure  # noqa: PLC0415  an extra

        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.learning_rates, self.losses, color="0.7", label="loss of a round")
        axes.plot(self.learning_rates, smoothed(self.losses), label="smoothed")
        if self.suggested is not None:
            axes.axvline(self.suggested, color="tab:red", linestyle="--", label=f"suggested: {self.suggested:.3g}")
        axes.set(xscale="log", xlabel="optimizer.learning_rate", ylabel="training loss")
        axes.legend()
        save_picture(figure, Path(path))


def exponential_rates(lowest: float, highest: float, num_rounds: int) -> list[float]:
    """Return rates from `lowest` to `highest`, each the same multiple of the one before."""
    return [lowest * (highest / lowest) ** (n / (num_rounds - 1)) for n in range(num_rounds)]


def smoothed(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the exponential moving average of losses, without its bias towards 0."""
    found, average = [], 0.0
    for count, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        found.append(average / (1 - _SMOOTHING**count))
    return np.array(found)


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls fastest over log rate, before its minimum; None if nowhere."""
    curve, first = smoothed(losses), len(losses) // _UNSTEADY
    last = first + int(np.argmin(curve[first:])) + 1
    if last - first < 2 or curve[first] - curve[last - 1] <= _FLAT * abs(curve[first]):
        return None
    slopes = np.gradient(curve[first:last], np.log(rates[first:last]))
    return float(rates[first + int(np.argmin(slopes))])


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the last loss is not finite, or the smoothed loss is far above its minimum."""
    if not math.isfinite(losses[-1]):
        return True
    curve = smoothed(losses)
    return len(losses) > FEWEST_ROUNDS and bool(curve[-1] > _DIVERGED * abs(curve.min()))


def find_learning_rate(run: Run, num_rounds: int, lowest: float, highest: float) -> LearningRateTest:
    """Train a copy of the run's learners on the batches that come next, with rates that rise. All ranks together.

    The run itself does not change, and neither do the process's random generators. Nothing may be in flight.

    Raises UserError for rates or numbers of rounds that make no test.
    """
    _check(run.optimizer, num_rounds, lowest, highest)
    base = for_learner(run.optimizer.learning_rate, 0)
    rates, losses = exponential_rates(lowest, highest, num_rounds), list[float]()
    diverged = False
    with kept_generators(run.choices.device):
        learners = Learners(copy := _copy_of(run), Reporter([], ThroughputMeter()))
        try:
            for rate in rates:
                losses.append(_loss_at(copy, learners, rate / base))
                if diverged := has_diverged(losses):
                    break
        finally:
            learners.close()
    finite = [loss for loss in losses if math.isfinite(loss)]
    suggested = steepest(rates[: len(finite)], finite) if finite else None
    optimizer = run.optimizer if suggested is None else scaled(run.optimizer, suggested / base)
    return LearningRateTest(rates[: len(losses)], losses, suggested, optimizer, diverged)


def scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    """Return the optimizer with all its learning rates times a factor."""

    def times(value: PerLearner) -> PerLearner:
        return tuple(each * factor for each in value) if isinstance(value, tuple) else value * factor

    changes: dict[str, Any] = {name: times(getattr(optimizer, name)) for name in _rates_of(optimizer)}
    return dataclasses.replace(optimizer, **changes)


def _rates_of(optimizer: Optimizer) -> list[str]:
    return [field.name for field in dataclasses.fields(optimizer) if field.name.endswith("learning_rate")]


def _shown(value: PerLearner) -> str:
    return f"[{','.join(f'{each:.3g}' for each in value)}]" if isinstance(value, tuple) else f"{value:.3g}"


def _check(optimizer: Optimizer, num_rounds: int, lowest: float, highest: float) -> None:
    if isinstance(num_rounds, bool) or not isinstance(num_rounds, int) or num_rounds < FEWEST_ROUNDS:
        raise UserError(f"num_rounds must be a whole number from {FEWEST_ROUNDS} on, got {num_rounds!r}; take more.")
    if not 0 < lowest < highest < math.inf:
        raise UserError(f"lowest and highest must be rates with 0 < lowest < highest, got {lowest} and {highest}.")
    if for_learner(optimizer.learning_rate, 0) == 0:
        raise UserError("find_learning_rate tries multiples of optimizer.learning_rate, got 0; set any rate above 0.")


def _copy_of(run: Run) -> Run:
    """Return a run with a bank of its own in the same state, which tunes, records and smooths nothing."""
    run.bank.adopt_learner()
    bank = new_bank(
        run.evaluator.template, run.bank.num_learners, run.choices.executor, run.settings, run.choices, run.optimizer,
        num_devices=run.bank.num_devices, device_index=run.bank.device_index, has_velocity=run.rule.has_velocity,
        gradient_mean=run.rule.gradient_mean, shares_base=run.bank.base.is_shared,
    )  # fmt: skip
    bank.load_state_dict(run.bank.state_dict())
    state = dataclasses.replace(run.state, non_finite_learners={}, compared=[], loss_sum=0.0, num_losses=0, best=None)
    return dataclasses.replace(
        run, bank=bank, state=state, loss=copied_loss(run.loss), average_ema=None, timeline=None, tuning=None,
        worker_autotuner=None, busy_cores=None,
    )  # fmt: skip


def _loss_at(run: Run, learners: Learners, factor: float) -> float:
    """Train one round with all rates times `factor`. Returns its mean loss; not finite if any learner's is not."""
    state = run.state
    # Rates are the optimizer's own, not a schedule's, so that the rule takes them as it would in a run with them.
    scaled_run = dataclasses.replace(run, update=TorchUpdate(scaled(run.optimizer, factor), run.rule))
    plan = plan_round(scaled_run, state.round_index, state.samples_seen, 1.0, *state.apart(1.0))
    plan = dataclasses.replace(plan, compares=False)
    learners.executor.submit(plan)  # the first since it was drained, so there is no outcome yet
    if plan.outer_step is not None:
        learners.take_outer_step(plan)
    learners.drain()
    state.note_round(run.samples_per_round, state.samples_seen, 1.0, plan.averages, run.bank.total_learners)
    total, count, non_finite = run.ranks.sum([state.loss_sum, state.num_losses, len(state.non_finite_learners)])
    state.loss_sum, state.num_losses = 0.0, 0
    return total / count if count and not non_finite else math.nan
