"""Builds a run: its feeds, bank and evaluator. Small batches go through the model before anything is trained."""

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
from crossbow_py.train.tuning.executor_choice import choose_executor, new_bank
from crossbow_py.train.tuning.learner_tuning import learner_bound, learner_tuning
from crossbow_py.train.tuning.worker_autotuner import first_workers, worker_autotuner

_FEW_ITEMS = 32  # looked through for rounded inputs before training


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
    """Build a run, after small batches of every data set went through the model. Raises UserError.

    All ranks call it together, and take the executor that the first one chooses. `announce` is given a sentence before
    anything that takes seconds.
    """
    loss, metrics = loss_on(choices.device, loss), metrics or {}
    collective = ranks.collective(choices.device, apart=rule.node_period > 1)
    check_settles(rule, settings.num_learners, collective.num_devices)
    template, choices, batch, (train_feed, validation_feed, test_feed), warnings = _probed(
        make_model, data, settings, choices, rule, loss, metrics, init_from, ranks
    )
    update, warning = choose_update(optimizer, rule, choices.device, choices.precision.master)
    choices, notes = _with_executor(
        template, settings, choices, update, train_feed, loss, announce, ranks, executor_cache
    )
    with ranks.together():
        most_learners, bounded = learner_bound(template, batch, settings, choices, loss, optimizer, rule)
        bank, average_ema = _bank(template, settings, choices, optimizer, rule, train_feed.num_samples, ranks)
    most_learners = most_settling(rule, most_learners, collective.num_devices)
    most_learners = min(int(each) for (each,) in ranks.gather([most_learners]))
    if not rule.has_central_model:
        _initialise_each(bank, make_model, settings.seed, init_from)
    return Run(
        data=data, settings=settings, schedule=schedule, checkpoints=checkpoints, distributed=distributed,
        output_dir=output_dir, experiment=experiment, names=_named(make_model, names), resumed_from=resumed_from,
        choices=choices, bank=bank, average_ema=average_ema, update=update, loss=loss,
        evaluator=_evaluator(template, batch, settings, choices, loss, metrics, max_evaluation_batches),
        train_feed=train_feed, validation_feed=validation_feed, test_feed=test_feed, collective=collective,
        ranks=ranks, nodes=ranks.nodes() if collective.apart else None, timeline=timeline, most_learners=most_learners,
        warnings=[*warnings, *filter(None, [warning]), *notes, *bounded, *_refusals(choices)],
        tuning=learner_tuning(settings.num_learners, most_learners),
        worker_autotuner=worker_autotuner(settings.num_workers, train_feed, ranks.num_local),
        busy_cores=busy_cores(choices.executor, choices.device.type, ranks.num_local == 1 and not train_feed.STREAMS),
    )  # fmt: skip


_Feeds = tuple[Feed, Feed | None, Feed | None]


def _probed(
    make_model: MakeModel,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    rule: AveragingRule,
    loss: Loss,
    metrics: Mapping[str, Metric],
    init_from: str | None,
    ranks: Ranks,
) -> tuple[nn.Module, Choices, Batch, _Feeds, list[str]]:
    """Return the template, the choices, a small batch, and the feeds of all data sets, once they fit; and warnings.

    All ranks call it together, and have the same template.
    """
    with ranks.together():
        template = seeded_model(make_model, settings.seed, init_from).to(choices.device)
        choices, train_feed, batch, warnings = _train_feed(template, data, settings, choices, loss, rule, ranks)
        template = faithful_copy(template, choices.precision, batch, settings.channels_last)
        validation_feed, test_feed = (
            _evaluation_feed(what, template, source, data, settings, choices, loss, metrics, ranks)
            for what, source in (("validation", data.validation), ("test", data.test))
        )
    # Other libraries on a host, or a model that draws from generators other than torch's, may initialise differently.
    ranks.copy_first(value for value in template.state_dict().values() if value.is_floating_point())
    return template, choices, batch, (train_feed, validation_feed, test_feed), warnings


def _with_executor(
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
    """Return the choices with the executor that the first rank chooses, and messages. All ranks together."""
    notes: list[str] = []

    def chosen() -> str:
        nonlocal choices, notes
        choices, notes = choose_executor(
            template, settings, choices, update, feed, loss, announce, ranks.num_ranks, cache
        )
        return choices.executor

    executor = ranks.from_first(chosen)
    return dataclasses.replace(choices, executor=executor), notes


def _evaluator(
    template: nn.Module,
    batch: Batch,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    metrics: Mapping[str, Metric],
    max_batches: int | None,
) -> Evaluator:
    return Evaluator(
        template, precision=choices.precision, loss=loss, metrics=metrics, max_batches=max_batches,
        batch_size=evaluation_batch_size(batch.inputs[0].numel()), channels_last=settings.channels_last,
    )  # fmt: skip


def _named(model: MakeModel, names: Mapping[str, str] | None) -> dict[str, str]:
    """Return the names of the model and the data in records."""
    return {"model": getattr(model, "__name__", type(model).__name__), "data": "custom", **(names or {})}


def _initialise_each(bank: ReplicaBank, make_model: MakeModel, seed: int, init_from: str | None) -> None:
    """Initialise each learner differently: they share every batch and are never averaged."""
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
    except (RuntimeError, MemoryError) as error:  # torch raises these when memory runs out, on CUDA too
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
    """Build the training feed and probe the model with a small batch; in fp32 if `auto` chose bf16 and that fails."""
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    # No more samples than a batch: BatchNorm over single values, for example, trains with two samples but not with one.
    batch = feed.first_samples(min(2, settings.batch_size))
    needs = (loss, *count_classes(data, loss), settings.label_smoothing, settings.compile_model)
    averages = settings.averages(rule, ranks.num_ranks)
    try:
        if settings.precision == "auto" and choices.precision != FP32:
            _check_integers(feed, choices.precision)
        return choices, feed, batch, probe(template, choices.precision, batch, *needs, feed=feed, averages=averages)
    except UserError as error:
        if settings.precision != "auto" or choices.precision == FP32:
            raise
        reason, _, _ = str(error).partition("; ")  # without the remedy, which is being applied
    choices = dataclasses.replace(choices, precision=FP32)
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    batch = feed.first_samples(min(2, settings.batch_size))
    warnings = probe(template, FP32, batch, *needs, feed=feed, averages=averages)
    return choices, feed, batch, [f"precision is fp32, because in bf16 {reason}.", *warnings]


def _check_integers(feed: Feed, precision: Precision) -> None:
    """Raise UserError for inputs with whole numbers that the precision rounds; looks at a few items."""
    feed.look_through(_FEW_ITEMS)
    if feed.rounded is not None:
        raise UserError(feed.rounded.remark(precision.compute))


def _evaluation_feed(
    what: str,
    template: nn.Module,
    source: Data | None,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    metrics: Mapping[str, Metric],
    ranks: Ranks,
) -> Feed | None:
    if source is None:
        return None
    feed = new_feed(source, 1, None, data, settings, choices, training=False, ranks=ranks)
    probe_evaluation(template, choices.precision, feed.first_samples(2), loss, what, metrics, feed)
    return feed


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
    """Build the feed of one of a run's data sets. Raises UserError for data that do not fit the settings."""
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
    """Return the reason why kernels do not make batches on CUDA, if there is one."""
    refusal = serves("batches", choices.device, choices.precision.compute) if choices.device.type == "cuda" else None
    return [refusal] if refusal else []


def count_classes(data: DataSets, loss: Loss) -> tuple[int | None, bool]:
    """Return the number of classes, None if unknown, and whether it is exact.

    If it was not given, it is at least the largest target of the training tensors plus one.
    """
    if loss is not nn.functional.cross_entropy:
        return None, False
    pair = as_pair(data.train)
    if data.num_classes is not None or pair is None or pair[1].ndim != 1 or not has_integers(pair[1]):
        return data.num_classes, True
    return int(pair[1].max()) + 1, False
