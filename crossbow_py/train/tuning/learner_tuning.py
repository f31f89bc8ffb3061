"""Tunes the number of learners in a run: the most that memory holds, and throughput windows for the auto-tuner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.data.feed import Batch
from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerState, Decision
from crossbow_py.engine.executors import EXECUTORS, has_one_row
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.goodput import NoiseScale
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.sizing.bound import free_bytes, learners_that_fit
from crossbow_py.engine.sizing.memory import Job
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.train.run_settings import Choices, RunSettings

WINDOW_S = 0.3


class LearnerTuning:
    """Cuts training time into windows and gives their throughput to the auto-tuner. Owned by the training loop.

    Args:
        tuner: the auto-tuner, a pure state machine.
        window_s: length of a window in seconds of training. A round that takes longer is a window by itself, and counts
            as many times as the length fits into it.
    """

    def __init__(self, tuner: AutoTuner, window_s: float = WINDOW_S) -> None:
        self.tuner, self.state = tuner, AutoTunerState()
        self._window_s = window_s
        self._begun_s: float | None = None
        self._images = 0

    def after_round(self, images: int, elapsed_s: float, noise: NoiseScale | None = None) -> Decision | None:
        """Count a round of `images`, over at `elapsed_s` of training without pauses. Returns a decision, if any.

        `noise` is what is known of the gradient noise; None if nothing ever will be.
        """
        if self._begun_s is None:
            self._begun_s = elapsed_s
            return None
        self._images += images
        seconds = elapsed_s - self._begun_s
        if seconds < self._window_s:
            return None
        rate = self._images / seconds
        self._begun_s, self._images = elapsed_s, 0
        self.state, decision = self.tuner.observe(self.state, rate, int(seconds / self._window_s), noise)
        return decision

    def interrupt(self) -> None:
        """Begin the current measurement anew, as rounds run under other conditions for a while."""
        self._begun_s, self._images = None, 0
        self.state = replace(self.state, recent=())

    def out_of_memory(self, noise: NoiseScale | None = None) -> Decision:
        """Note that the current number of learners does not fit in memory. Returns the decision that follows."""
        self._begun_s, self._images = None, 0
        self.state, decision = self.tuner.out_of_memory(self.state, noise)
        return decision

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {**self.state.to_plain(), "max_learners": self.tuner.max_learners}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `to_plain()`, whose limit may have been another."""
        former_limit = values.get("max_learners", self.tuner.max_learners)
        self.state = self.tuner.resumed(AutoTunerState.from_plain(dict(values)), former_limit)


def learner_bound(
    template: nn.Module,
    batch: Batch,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    optimizer: Optimizer,
    rule: AveragingRule,
    shares_base: bool = True,
) -> tuple[int, list[str]]:
    """Return the most learners for the auto-tuner to try, and messages for the user. A fixed number is left as it is.

    `batch` holds a few samples. If memory runs out despite the estimate, training shrinks to fewer learners.
    """
    if settings.num_learners != "auto" or settings.max_learners == 1:
        return settings.max_learners, []
    order = EXECUTORS[choices.executor].ORDER or ("rows" if choices.device.type == "cpu" else "blocks")
    job = Job(
        loss, optimizer, rule, choices.precision, settings.channels_last, order, settings.accumulate, shares_base,
        has_one_row(choices.executor, optimizer, rule.gradient_mean), choices.device.type == "cuda",
    )  # fmt: skip
    try:
        fitting = learners_that_fit(
            template, batch.inputs, batch.targets, job,
            batch_size=settings.batch_size, max_learners=settings.max_learners,
            in_turn=choices.executor == SerialExecutor.NAME, limit_bytes=free_bytes(choices.device),
        )  # fmt: skip
    except Exception as error:  # whatever the model or torch raises must not end the run
        reason = str(error) if isinstance(error, UserError) else one_line(error)
        return settings.max_learners, [f"How many learners memory holds is not known: {reason}"]
    if fitting == settings.max_learners:
        return fitting, []
    return fitting, [f"Memory holds about {fitting} of at most {settings.max_learners} learners; no more are tried."]
