"""Checks that a run's settings fit each other, across the groups that they belong to."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import UserError
from crossbow_py.distributed.launch import launched
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.auto_tuner import AutoTunerSettings
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.update.optimizers import Optimizer, TorchOptimizer
from crossbow_py.train.checks.losses import settled_loss, untrained
from crossbow_py.train.run_settings import RunSettings
from crossbow_py.train.schedules import Schedule

_LONGEST_SHOWN = 60


def check_compatible(
    settings: RunSettings,
    optimizer: Optimizer,
    schedule: Schedule,
    averaging: AveragingRule,
    loss: Loss | None,
    max_evaluation_batches: int | None,
    ranks: Ranks,
) -> None:
    """Raise UserError for settings that do not fit each other, on all ranks alike. All ranks call it together."""
    if ranks is ALONE and launched():
        warnings.warn(
            "torchrun has started several ranks, and this Trainer was given none: each of them trains a model of its "
            "own. For one model, use `with joined() as ranks:` and Trainer(..., ranks=ranks).",
            stacklevel=5,
        )
    least_local = int(min(count for (count,) in ranks.gather([ranks.num_local])))
    with ranks.together():
        _check_groups(optimizer, schedule, averaging, loss)
        _check_policies(settings, optimizer, averaging, loss, max_evaluation_batches, ranks)
        _check_ranks(settings, averaging, ranks, least_local)


def _check_groups(optimizer: Any, schedule: Any, averaging: Any, loss: Any) -> None:
    for name, value, base, example in (
        ("optimizer", optimizer, Optimizer, "SGD()"),
        ("schedule", schedule, Schedule, "Constant()"),
        ("averaging", averaging, AveragingRule, "SMA()"),
    ):
        if base is Optimizer and isinstance(value, list | tuple):
            raise UserError(
                "optimizer is one for all learners, got a list; list its rates, SGD(learning_rate=[0.01, 0.1]), or "
                "give models optimizers of their own by train_many(members=[Member(optimizer=...), ...])."
            )
        if not isinstance(value, base):
            raise UserError(
                f"{name} must be one of crossbow_py's, such as {example}, got {_shown(value)}; import one from "
                "crossbow_py."
            )
    if loss is None:
        return
    if not callable(loss):
        raise UserError(
            f"loss must be a function (outputs, targets) -> tensor, such as nn.MSELoss(), got {loss!r}; give one, or "
            "leave it out for cross-entropy."
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UserError(f"loss must be an object, got the class {loss.__name__}; give loss={loss.__name__}().")
    if parameter := untrained(loss):
        raise UserError(
            f"the loss holds a parameter, {parameter}, which nothing would train, as learners train the model alone; "
            "put it into the model, set its requires_grad to False, or, for a penalty on weights, take "
            "optimizer.weight_decay."
        )


def check_tuner(given: Any) -> None:
    """Raise UserError for settings of the auto-tuner that are none."""
    if not isinstance(given, AutoTunerSettings):
        raise UserError(
            f"auto_tuner must be AutoTunerSettings(objective=...), got {_shown(given)}; import it from crossbow_py."
        )


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def check_learning(settings: RunSettings, optimizer: Optimizer, rule: AveragingRule, num_ranks: int = 1) -> None:
    """Raise UserError for an optimizer and a rule that do not fit each other or these settings."""
    optimizer.check_learners(settings.num_learners)
    mean = rule.gradient_mean
    for name in optimizer.per_learner() if mean is not None and mean.group_size != 1 else ():
        if isinstance(getattr(optimizer, name), tuple):
            raise UserError(
                f"optimizer.{name} has a value for each learner, and with averaging={rule.NAME} all learners step by "
                "the same gradient; give one value for all."
            )
    if settings.count_effective_samples and not rule.compares_gradients:
        raise UserError(
            f"count_effective_samples=true goes by the gradient noise, which averaging={rule.NAME} does not show with "
            f"these settings, as learners are apart; {rule.TO_COMPARE}, or leave it out."
        )
    if optimizer.prepares_weights and settings.averages(rule, num_ranks) and rule.pulls_apart:
        raise UserError(
            f"optimizer.normalize_weights=true gives weights a norm that averaging={rule.NAME} takes from them again, "
            "as it pulls them to an average that has another; set averaging=synchronous_sgd, or leave it out."
        )
    if isinstance(optimizer, TorchOptimizer) and (key := _averages_state(rule)):
        raise UserError(
            f"averaging.{key}=average has no meaning for the state of optimizer=torch, which may be of any form; set "
            f"averaging.{key}=reset."
        )
    count = settings.num_learners
    if isinstance(count, str) and not rule.has_central_model:
        raise UserError(f"averaging={rule.NAME} needs a fixed num_learners, got {count}; set it: num_learners=4.")
    if count == "seesaw":
        _check_seesaw(settings, optimizer, rule)
    elif settings.min_learners != 1:
        raise UserError(
            f"min_learners={settings.min_learners} is what num_learners=seesaw begins with, got num_learners={count}; "
            "leave it out."
        )


def _check_seesaw(settings: RunSettings, optimizer: Optimizer, rule: AveragingRule) -> None:
    if settings.min_learners > settings.max_learners:
        raise UserError(
            f"num_learners=seesaw goes from min_learners={settings.min_learners} up to max_learners="
            f"{settings.max_learners}; set a larger max_learners."
        )
    if optimizer.noise_power is None:
        raise UserError(
            f"num_learners=seesaw scales the learning rate by the optimizer's noise, and that of optimizer="
            f"{optimizer.NAME} is not known; set optimizer=sgd, adamw or muon."
        )
    if rule.scales_by_gain:
        raise UserError(
            "num_learners=seesaw and averaging.rate_scaling=adascale both say how the rate follows the learners; set "
            "averaging.rate_scaling=none."
        )


def _averages_state(rule: AveragingRule) -> str | None:
    """Return the setting by which the rule averages optimizer state; None if it does not."""
    names = ("restart_momentum", "learner_momentum")
    return next((name for name in names if getattr(rule, name, None) == "average"), None)


def _check_policies(
    settings: RunSettings,
    optimizer: Optimizer,
    rule: AveragingRule,
    loss: Loss | None,
    max_evaluation_batches: int | None,
    ranks: Ranks,
) -> None:
    check_learning(settings, optimizer, rule, ranks.num_ranks)
    of_classes = loss is None or settled_loss(loss) is nn.functional.cross_entropy
    if settings.label_smoothing and not of_classes:
        raise UserError(
            f"label_smoothing={settings.label_smoothing} is for cross-entropy, and another loss was given; "
            "set label_smoothing=0, and smooth inside the loss."
        )
    if settings.class_weights is not None and not of_classes:
        raise UserError(
            "class_weights are for cross-entropy, and another loss was given; leave them out, and give that loss its "
            "own weights, as in nn.NLLLoss(weight=...)."
        )
    if settings.class_weights is not None and settings.label_smoothing:
        raise UserError(
            f"class_weights and label_smoothing={settings.label_smoothing} do not go together; leave one out, or give "
            "loss=nn.CrossEntropyLoss(weight=..., label_smoothing=...)."
        )
    if max_evaluation_batches is not None and max_evaluation_batches < 1:
        raise UserError(
            f"max_evaluation_batches must be at least 1 or None, got {max_evaluation_batches}; None evaluates on all."
        )
    if settings.on_nonfinite == "reseed" and not settings.averages(rule, ranks.num_ranks):
        raise UserError(
            f"on_nonfinite=reseed clones the average model, and averaging={rule.NAME} with "
            f"num_learners={settings.num_learners} has none; set on_nonfinite=stop."
        )


def _check_ranks(settings: RunSettings, rule: AveragingRule, ranks: Ranks, least_local: int) -> None:
    if ranks.num_ranks > 1 and not rule.has_central_model:
        raise UserError(
            f"averaging={rule.NAME} trains models that are never averaged, on one device, got {ranks.num_ranks} ranks; "
            "start it without torchrun, once for each device."
        )
    alone = least_local * settings.first_learners == 1
    if rule.node_period > 1 and ranks.num_nodes > 1 and alone:
        raise UserError(
            f"averaging.node_period={rule.node_period} keeps an average model in each node, which needs two learners "
            "in each, got one; set num_learners=2 or averaging.node_period=1."
        )
