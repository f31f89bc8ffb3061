"""Builds a run: feeds, bank, evaluator; all are tried on small batches before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.averaging.stability import check_settles, most_settling
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.datasets import Data, as_pair, has_integers
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.dropout import counter_seed
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.modules.precision import FP32, Precision
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.checks.losses import loss_on
from crossbow_py.train.checks.probe import probe, probe_evaluation
from crossbow_py.train.checks.seeded_model import MakeModel, faithful_copy, seeded_model
from crossbow_py.train.evaluation.evaluator import Evaluator, Metric, evaluation_batch_size
from crossbow_py.train.run import DataSets, Run
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.schedules import Constant, Schedule
from crossbow_py.train.tuning.busy_cores import busy_cores
from crossbow_py.train.tuning.executor_choice import new_bank, settle_executor
from crossbow_py.train.tuning.learner_tuning import learner_bound, learner_tuning
from crossbow_py.train.tuning.worker_autotuner import first_workers, worker_autotuner

_FEW_ITEMS = 32  # to be looked at before training


def build_run(
    make_model: MakeModel,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    *,
    optimizer: Optimizer,
    rule: AveragingRule,
    schedule: Schedule = Constant(),
    loss: Loss = nn.functional.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
    init_from: str | None = None,
    max_evaluation_batches: int | None = None,
    checkpoints: CheckpointSettings = CheckpointSettings(),
    distributed: DistributedSettings = DistributedSettings(),
    output_dir: Path | None = None,
    experiment: str = "custom",
    names: Mapping[str, str] | None = None,
    resumed_from: str | None = None,
    timeline: Timeline | None = None,
    announce: Callable[[str], None] = lambda _: None,
    ranks: Ranks = ALONE,
    executor_cache: Path | None = None,
) -> Run:
    """Build a run, once small batches of every data set went through the model. Raises UserError.

    All ranks call it together; what `auto` becomes on the first is taken by all. `announce` is told what takes long.
    """
    loss, metrics = loss_on(choices.device, loss), metrics or {}
    collective = ranks.collective(choices.device, apart=rule.node_period > 1)
    check_settles(rule, settings.num_learners, collective.num_devices)
    with ranks.together():
        template = seeded_model(make_model, settings.seed, init_from).to(choices.device)
        choices, train_feed, batch, warnings = _train_feed(template, data, settings, choices, loss, rule, ranks)
        template = faithful_copy(template, choices.precision, batch, settings.channels_last)
        feeds = _evaluation_feeds(template, data, settings, choices, loss, metrics, ranks)
    # Hosts' libraries, or a model that draws from other generators than torch's, may have made another of it.
    ranks.copy_first(value for value in template.state_dict().values() if value.is_floating_point())
    update, warning = choose_update(optimizer, rule, choices.device, choices.precision.master)
    choosing = template, settings, choices, update, train_feed, loss, announce, ranks, executor_cache
    choices, notes = _choose_executor(*choosing)
    with ranks.together():
        most_learners, bounded = learner_bound(template, batch, settings, choices, loss, optimizer, rule)
        bank, average_ema = _bank(template, settings, choices, optimizer, rule, train_feed.num_samples, ranks)
    most_learners = int(min(ranks.gather([most_settling(rule, most_learners, collective.num_devices)]))[0])
    if not rule.has_central_model:
        _begin_apart(bank, make_model, settings.seed, init_from)
    return Run(
        data=data, settings=settings, schedule=schedule, checkpoints=checkpoints, distributed=distributed,
        output_dir=output_dir, experiment=experiment, names=_named(make_model, names), resumed_from=resumed_from,
        choices=choices, bank=bank, average_ema=average_ema, update=update, loss=loss,
        evaluator=_evaluator(template, batch, settings, choices, loss, metrics, max_evaluation_batches),
        train_feed=train_feed, validation_feed=feeds[0], test_feed=feeds[1], collective=collective,
        ranks=ranks, nodes=ranks.nodes() if collective.apart else None, timeline=timeline,
        most_learners=most_learners,
        warnings=[*warnings, *filter(None, [warning]), *notes, *bounded, *_refusals(choices)],
        tuning=learner_tuning(settings.num_learners, most_learners),
        worker_autotuner=worker_autotuner(settings.num_workers, train_feed, ranks.num_local),
        busy_cores=busy_cores(choices.executor, choices.device.type, ranks.num_local == 1 and not train_feed.STREAMS),
    )  # fmt: skip


def _choose_executor(
    template: nn.Module,
    settings: RunSettings,
    choices: Choices,
    update: TorchUpdate,
    feed: Feed,
    loss: Loss,
    announce: Callable[[str], None],
    ranks: Ranks,
    cache: Path | None,
) -> tuple[Choices, list[str]]:
    """Settle the executor on the first rank, for all; only there does it cost time, and are there notes."""
    notes: list[str] = []

    def settled() -> str:
        nonlocal choices
        choices, said = settle_executor(
            template, settings, choices, update, feed, loss, announce, ranks.num_ranks, cache
        )
        notes.extend(said)
        return choices.executor

    executor = ranks.from_first(settled)
    return dataclasses.replace(choices, executor=executor), notes


def _named(model: MakeModel, names: Mapping[str, str] | None) -> dict[str, str]:
    """Return what the model and the data are called in records."""
    return {"model": getattr(model, "__name__", type(model).__name__), "data": "custom", **(names or {})}


def _begin_apart(bank: ReplicaBank, make_model: MakeModel, seed: int, init_from: str | None) -> None:
    """Start learners that share every batch and are never averaged from models of their own."""
    for learner in range(1, bank.num_learners):
        own_seed = counter_seed(seed, "initialisation", 0, learner)
        bank.load_learner(learner, seeded_model(make_model, own_seed, init_from))


def _bank(
    template: nn.Module,
    settings: RunSettings,
    choices: Choices,
    optimizer: Optimizer,
    rule: AveragingRule,
    num_samples: int,
    ranks: Ranks,
) -> tuple[ReplicaBank, AverageEMA | None]:
    try:
        bank = new_bank(
            template, settings.first_learners, choices.executor, settings, choices, optimizer,
            num_devices=ranks.num_ranks, device_index=ranks.rank, has_velocity=rule.has_velocity,
            gradient_mean=rule.gradient_mean,
        )  # fmt: skip
        return bank, None if rule.average_ema is None else AverageEMA(bank, rule.average_ema * num_samples)
    except (RuntimeError, MemoryError) as error:  # how torch says that there is no memory left, CUDA's error included
        raise UserError(
            f"num_learners={settings.num_learners} replicas of this model cannot be allocated on {choices.device} "
            f"({one_line(error)[:200]}); lower num_learners."
        ) from error


def _train_feed(
    template: nn.Module,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    rule: AveragingRule,
    ranks: Ranks,
) -> tuple[Choices, Feed, Batch, list[str]]:
    """The feed of training batches, tried on a small one; where `auto` took bf16 and the model cannot, it is fp32."""
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    # Not more than a batch: BatchNorm on single values, for one, trains with two samples and not with one.
    batch = feed.first_samples(min(2, settings.batch_size))
    needs = (loss, *count_classes(data, loss), settings.label_smoothing, settings.compile_model)
    averages = rule.has_central_model and (settings.several or ranks.num_ranks > 1)
    try:
        if settings.precision == "auto" and choices.precision != FP32:
            _check_integers(feed, choices.precision)
        return choices, feed, batch, probe(template, choices.precision, batch, *needs, feed=feed, averages=averages)
    except UserError as error:
        if settings.precision != "auto" or choices.precision == FP32:
            raise
        reason, _, _ = str(error).partition("; ")  # what to do about it is done
    choices = dataclasses.replace(choices, precision=FP32)
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    batch = feed.first_samples(min(2, settings.batch_size))
    warnings = probe(template, FP32, batch, *needs, feed=feed, averages=averages)
    return choices, feed, batch, [f"precision is fp32, because in bf16 {reason}.", *warnings]


def _check_integers(feed: Feed, precision: Precision) -> None:
    """Raise UserError for inputs with whole numbers that the precision rounds; of items a few are looked at."""
    feed.look_through(_FEW_ITEMS)
    if feed.rounded is not None:
        raise UserError(feed.rounded.remark(precision.compute))


def _evaluation_feeds(
    template: nn.Module,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    metrics: Mapping[str, Metric],
    ranks: Ranks,
) -> list[Feed | None]:
    """Return the feeds of validation and test data, each tried on two samples; None where there are no data."""
    feeds: list[Feed | None] = []
    for what, source in (("validation", data.validation), ("test", data.test)):
        feed = None
        if source is not None:
            feed = new_feed(source, 1, None, data, settings, choices, training=False, ranks=ranks)
            probe_evaluation(template, choices.precision, feed.first_samples(2), loss, what, metrics, feed)
        feeds.append(feed)
    return feeds


def _evaluator(
    template: nn.Module,
    batch: Batch,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    metrics: Mapping[str, Metric],
    max_batches: int | None,
) -> Evaluator:
    size = evaluation_batch_size(batch.inputs[0].numel())
    return Evaluator(
        template, precision=choices.precision, loss=loss, metrics=metrics, max_batches=max_batches, batch_size=size,
        channels_last=settings.channels_last,
    )  # fmt: skip


def new_feed(
    source: Data,
    batch_size: int,
    augmentation: Augmentation | None,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    training: bool = True,
    ranks: Ranks = ALONE,
) -> Feed:
    """The feed of one of a run's data sets. Raises UserError for what does not fit it."""
    return make_feed(
        source,
        batch_size,
        settings.seed,
        choices.device,
        augmentation,
        data.mean,
        data.std,
        settings.channels_last,
        choices.precision.compute,
        kernels=choices.device.type == "cuda" and not _refusals(choices),
        num_workers=first_workers(settings.num_workers, choices.device, training, ranks.num_local),
        num_ranks=ranks.num_ranks if training else 1,
        order_seed=settings.order_seed,
    )


def _refusals(choices: Choices) -> list[str]:
    """Why kernels do not make batches, where one would expect it."""
    refusal = serves("batches", choices.device, choices.precision.compute) if choices.device.type == "cuda" else None
    return [refusal] if refusal else []


def count_classes(data: DataSets, loss: Loss) -> tuple[int | None, bool]:
    """As given, exactly; else at least one more than the largest target of training tensors. None: none to count."""
    if loss is not nn.functional.cross_entropy:
        return None, False
    pair = as_pair(data.train)
    if data.num_classes is not None or pair is None or pair[1].ndim != 1 or not has_integers(pair[1]):
        return data.num_classes, True
    return int(pair[1].max()) + 1, False
