"""How many learners `num_learners=auto` may try: no more than memory holds."""

from __future__ import annotations

from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.data.feed import Batch
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.sizing.bound import free_bytes, learners_that_fit
from crossbow_py.engine.sizing.job import Job
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.train.run_settings import Choices, RunSettings


def learner_bound(
    template: nn.Module,
    batch: Batch,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    optimizer: Optimizer,
    rule: AveragingRule,
) -> tuple[int, list[str]]:
    """The largest number of learners, and sentences for the user. A fixed number of learners is left as it is.

    `batch` are a few samples. What the estimate has overlooked is found out when it is tried, as before.
    """
    if settings.num_learners != "auto" or settings.max_learners == 1:
        return settings.max_learners, []
    order = EXECUTORS[choices.executor].ORDER or ("rows" if choices.device.type == "cpu" else "blocks")
    job = Job(loss, optimizer, rule, choices.precision, settings.channels_last, order)
    try:
        fitting = learners_that_fit(
            template, batch.inputs, batch.targets, job,
            batch_size=settings.batch_size, max_learners=settings.max_learners,
            in_turn=choices.executor == SerialExecutor.NAME, limit_bytes=free_bytes(choices.device),
        )  # fmt: skip
    except Exception as error:  # of the model, or of a torch that counts otherwise: no reason to end a training run
        reason = str(error) if isinstance(error, UserError) else one_line(error)
        return settings.max_learners, [f"How many learners memory holds is not known: {reason}"]
    if fitting == settings.max_learners:
        return fitting, []
    return fitting, [f"Memory holds about {fitting} of at most {settings.max_learners} learners; no more are tried."]
