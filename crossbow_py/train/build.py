"""Builds the parts of a run: feeds, bank, evaluator; tries them on small batches before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.averaging.stability import check_settles, most_settling
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data, as_pair, has_integers
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.feeds import make_feed
from crossbow_py.data.normalisation import Normalisation
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.dropout import counter_seed
from crossbow_py.engine.modules.precision import FP32, Precision
from crossbow_py.engine.rounds import Loss
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.checks.losses import loss_on
from crossbow_py.train.checks.probe import probe, probe_evaluation
from crossbow_py.train.checks.seeded_model import MakeModel, faithful_copy, seeded_model
from crossbow_py.train.components import Parts
from crossbow_py.train.evaluation.evaluator import Evaluator, Metric, evaluation_batch_size
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.executor_choice import new_bank, settle_executor
from crossbow_py.train.tuning.learner_bound import learner_bound
from crossbow_py.train.tuning.worker_autotuner import first_workers

_FEW_ITEMS = 32  # to be looked at before training


@dataclass(frozen=True)
class DataSets:
    """What is trained on and measured on, and how images are prepared."""

    train: Data
    test: Data | None = None
    validation: Data | None = None
    num_classes: int | None = None
    augmentation: Augmentation | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    class_names: Sequence[str] | None = None

    @property
    def normalisation(self) -> Normalisation | None:
        """Of inputs. Raises UserError when only one of `mean` and `std` is there."""
        return Normalisation.of(self.mean, self.std)

    @property
    def names_of_classes(self) -> list[str]:
        """What classes are called: as given, or as the test data says, in `classes`; empty where nobody does."""
        return list(map(str, self.class_names or getattr(self.test, "classes", None) or ()))


def build_parts(
    make_model: MakeModel,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    *,
    optimizer: Optimizer,
    rule: AveragingRule,
    loss: Loss,
    metrics: Mapping[str, Metric],
    init_from: str | None,
    max_evaluation_batches: int | None,
    timeline: Timeline | None,
    announce: Callable[[str], None],
    ranks: Ranks = ALONE,
    executor_cache: Path | None = None,
) -> Parts:
    """Build a run's parts, once small batches of every data set went through the model. Raises UserError.

    All ranks call it together; what `auto` becomes on the first is taken by all. `announce` is told what takes long.
    """
    loss = loss_on(choices.device, loss)
    collective = ranks.collective(choices.device, apart=rule.node_period > 1)
    check_settles(rule, settings.num_learners, collective.num_devices)
    with ranks.together():
        template = seeded_model(make_model, settings.seed, init_from).to(choices.device)
        choices, train_feed, batch, warnings = _train_feed(template, data, settings, choices, loss, rule, ranks)
        template = faithful_copy(template, choices.precision, batch, settings.channels_last)
        validation_feed, test_feed = (
            _evaluation_feed(what, template, source, data, settings, choices, loss, metrics, ranks)
            for what, source in (("validation", data.validation), ("test", data.test))
        )
    # Hosts' libraries, or a model that draws from other generators than torch's, may have made another of it.
    ranks.copy_first(value for value in template.state_dict().values() if value.is_floating_point())
    update, warning = choose_update(optimizer, rule, choices.device, choices.precision.master)
    warnings += [warning] if warning else []
    asked = (template, settings, choices, update, train_feed, loss, announce, ranks.num_ranks, executor_cache)
    choices, notes = _settled(choices, ranks, lambda: settle_executor(*asked))
    with ranks.together():
        most_learners, bounded = learner_bound(template, batch, settings, choices, loss, optimizer, rule)
        bank, average_ema = _bank(template, settings, choices, optimizer, rule, train_feed.num_samples, ranks)
    most_learners = most_settling(rule, most_learners, collective.num_devices)
    most_learners = min(int(each) for (each,) in ranks.gather([most_learners]))
    if not rule.has_central_model:
        _begin_apart(bank, make_model, settings.seed, init_from)
    evaluator = Evaluator(
        template, precision=choices.precision, loss=loss, metrics=metrics, max_batches=max_evaluation_batches,
        batch_size=evaluation_batch_size(batch.inputs[0].numel()), channels_last=settings.channels_last,
    )  # fmt: skip
    warnings += [*notes, *bounded, *_refusals(choices)]
    return Parts(
        choices, bank, average_ema, update, loss, evaluator, train_feed, validation_feed, test_feed,
        collective, warnings, timeline, settings.compile_model, most_learners, ranks,
        ranks.nodes() if collective.apart else None, settings.label_smoothing,
    )  # fmt: skip


def _settled(
    choices: Choices, ranks: Ranks, settle: Callable[[], tuple[Choices, list[str]]]
) -> tuple[Choices, list[str]]:
    """Settle the executor on the first rank; the others take it. Returns the choices, and what is to be said of it."""
    found, notes = choices, list[str]()

    def first() -> str:
        nonlocal found, notes
        found, notes = settle()
        return found.executor

    executor = ranks.from_first(first)
    return dataclasses.replace(found, executor=executor), notes


def _begin_apart(bank: ReplicaBank, make_model: MakeModel, seed: int, init_from: str | None) -> None:
    """Learners that share every batch and never meet must at least not start from one model."""
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
