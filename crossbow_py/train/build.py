"""Builds a run: its feeds, bank and evaluator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from crossbow_py.averaging.stability import check_settles, most_stable_learners
from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.files import given_path
from crossbow_py.core.trees import values_per_sample
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.class_balance import sample_weights, weighted_loss
from crossbow_py.data.datasets import (
    Classes,
    Data,
    as_pair,
    check_data,
    class_labels,
    has_integers,
    has_named_inputs,
    in_tensors,
    num_samples,
    with_labels,
)
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.mixing import Mixing, check_mixable
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.auto_tuner import AutoTuner
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.frozen_base import only_reads, read_parameters
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, candidates
from crossbow_py.engine.goodput import NoiseScale
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.dropout import counter_seed
from crossbow_py.engine.modules.losses import Loss, TokenLoss, model_loss, plain_loss
from crossbow_py.engine.modules.precision import FP32, device_uuids
from crossbow_py.engine.modules.standardized import StandardizedLoss, is_standardized, standardizing
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.arguments import TrainArguments
from crossbow_py.train.checks.losses import loss_on, not_shares, remarks_on_targets, standardizes, target_statistics
from crossbow_py.train.checks.probe import find_only_read, probe, probe_evaluation, settled_on_tokens, takes_labels
from crossbow_py.train.checks.seeded_model import faithful_copy, initialising, remarks_on_starts, seeded_model
from crossbow_py.train.evaluation.evaluator import Evaluator, evaluation_batch_size
from crossbow_py.train.evaluation.metrics import Metric, checked_metrics
from crossbow_py.train.ladder.ladder import check_trusted, has_failed, try_on_ranks
from crossbow_py.train.run import DataSets, Run
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.train_state import TrainState
from crossbow_py.train.tuning.busy_cores import busy_cores
from crossbow_py.train.tuning.executor_choice import choose_executor, executor_for, new_bank
from crossbow_py.train.tuning.learner_tuning import LearnerTuning, learner_bound
from crossbow_py.train.tuning.worker_autotuner import first_workers, worker_autotuner

_FEW_ITEMS = 32  # looked through for rounded inputs before training


class RunBuilder:
    """Builds a run from the arguments of `Trainer`. All ranks do so together.

    `choices`, `loss`, `metrics` and `data` are settled on the way. `announce` is given a sentence before anything that
    takes seconds.
    """

    def __init__(
        self,
        arguments: TrainArguments,
        *,
        choices: Choices,
        announce: Callable[[str], None] = lambda _: None,
        output_dir: Path | None = None,
        resumed_from: str | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.arguments, self.settings, self.ranks = arguments, arguments.settings, arguments.ranks
        self.optimizer, _, self.rule = arguments.rules
        self.choices, self.announce = choices, announce
        self.output_dir, self.resumed_from, self.timeline = output_dir, resumed_from, timeline
        self.metrics: Mapping[str, Metric] = arguments.metrics or {}
        given = arguments.init_from
        self.init_from = None if given is None or resumed_from else str(given_path("init_from", given))
        cache = arguments.executor_cache
        self.executor_cache = None if cache is None else given_path("executor_cache", cache)
        test, validation = in_tensors(arguments.test_data), in_tensors(arguments.validation_data)
        self.data = DataSets(
            in_tensors(arguments.train_data),
            test,
            validation,
            arguments.num_classes,
            arguments.augmentation,
            arguments.mean,
            arguments.std,
            arguments.sample_weights,
            arguments.class_names,
        )
        self._make_model = arguments.model
        self._standardizes = standardizes(arguments.standardize_targets, self.data.train, arguments.loss)

    def build(self) -> Run:
        """Build the run, once, after small batches of every data set went through the model. Raises UserError."""
        settings, ranks, rule, device = self.settings, self.ranks, self.rule, self.choices.device
        tried = self._try_device()
        with ranks.together():
            self.metrics = checked_metrics(self.arguments.metrics, ranks.num_ranks)
        collective = ranks.collective(device, apart=rule.node_period > 1)
        check_settles(rule, None if settings.num_learners == "auto" else settings.most_learners, collective.num_devices)
        evaluator, batch, (train_feed, validation_feed, test_feed), warnings = self._probed()
        template, loss = evaluator.template, evaluator.loss
        if settings.class_weights is not None:  # in training alone
            width = evaluator.num_classes(train_feed)
            weighted = weighted_loss(settings.class_weights, class_labels(self.data.train), width).to(device)
            loss = TokenLoss(weighted) if isinstance(loss, TokenLoss) else weighted
        self._set_mixing(train_feed, batch, loss, evaluator)
        update, warning = choose_update(self.optimizer, rule, device, self.choices.precision.master)
        shares_base = self._shares_base(template)
        notes = [*tried, *self._choose_executor(template, update, train_feed, loss, shares_base)]
        choices = self.choices
        with ranks.together():
            most, bounded = learner_bound(template, batch, settings, choices, loss, self.optimizer, rule, shares_base)
            bank, average_ema = self._bank(template, train_feed.num_samples, shares_base)
        if bank.base and bank.base.is_shared and bank.num_learners > 1:
            notes.append(f"{bank.base.num_values:,} frozen values are held once for all learners.")
        if not rule.has_central_model:  # learners share every batch and are never averaged
            for learner in range(1, bank.num_learners):
                apart = self._independent(learner)
                bank.load_learner(learner, apart)
                notes += remarks_on_starts(template, apart) if learner == 1 and self.init_from is None else []
        make_model = self.arguments.model
        model = getattr(make_model, "__name__", type(make_model).__name__)
        tuning, noise, remarks = self._tuning(most, collective.num_devices)
        return Run(
            arguments=self.arguments, data=self.data, output_dir=self.output_dir, resumed_from=self.resumed_from,
            names={"model": model, "data": "custom", **(self.arguments.names or {})},
            choices=choices, bank=bank, average_ema=average_ema, update=update, loss=loss, evaluator=evaluator,
            train_feed=train_feed, validation_feed=validation_feed, test_feed=test_feed, collective=collective,
            ranks=ranks, places=ranks.places(device_uuids(device)),
            nodes=ranks.nodes() if collective.apart else None, timeline=self.timeline,
            warnings=[
                *warnings, *filter(None, [warning]), *notes, *bounded, *remarks, *_refusals(choices),
                *self.optimizer.remarks(template), *_of_micro_batches(settings, template),
                *remarks_on_targets(self.data.train, loss, template),
                *_of_evaluations(evaluator, {"validation": validation_feed, "test": test_feed}),
            ],
            tokens_per_sample=evaluator.tokens_per_sample(train_feed), tuning=tuning, state=TrainState(noise=noise),
            worker_autotuner=worker_autotuner(settings.num_workers, train_feed, ranks.num_local),
            busy_cores=busy_cores(
                executor_for(settings.first_learners, settings, choices, ranks.num_ranks), device.type,
                ranks.num_local == 1 and not train_feed.STREAMS,
            ),
        )  # fmt: skip

    def _tuning(self, fitting: int, num_devices: int) -> tuple[LearnerTuning | None, NoiseScale | None, list[str]]:
        """Return the tuning of at most `fitting` learners, the gradient noise if it is measured, and messages."""
        rule, tuner, remarks = self.rule, None, list[str]()
        most = most_stable_learners(rule, fitting, num_devices)
        if self.settings.num_learners == "auto" and most < fitting:
            learners = "one learner" if most == 1 else f"{most} learners"
            remarks.append(
                f"num_learners=auto takes at most {learners}: with more, averaging={rule.NAME} is not stable at these "
                "settings."
            )
        most = min(int(each) for (each,) in self.ranks.gather([most]))
        if self.settings.num_learners == "auto":
            tuner = AutoTuner(objective=self.arguments.auto_tuner.objective, max_learners=most, num_devices=num_devices)
        by_goodput = tuner is not None and tuner.objective == "goodput" and most * num_devices > 1
        if by_goodput and not rule.compares_gradients:
            remarks += [
                "num_learners=auto goes by images/s alone: with these settings of averaging learners are apart, and "
                "their gradients do not tell how much a sample is worth."
            ]
        wanted = rule.scales_by_gain or self.settings.count_effective_samples
        compares = wanted or (by_goodput and rule.compares_gradients)
        noise = NoiseScale(self.settings.samples_per_step) if compares else None
        return None if tuner is None else LearnerTuning(tuner), noise, remarks

    def _try_device(self) -> list[str]:
        """Find out what `executor=auto` may take on a GPU, before anything is made for kernels. Returns messages.

        Raises UserError if the device failed with `serial`.
        """
        device, ranks = self.choices.device, self.ranks
        notes: list[str] = []
        if self.settings.executor != "auto":
            return []
        outcomes = try_on_ranks(device, ranks, self.announce)
        if self.settings.precision == "auto" and any(ranks.sum([has_failed("bf16", outcomes)])):
            self.choices = dataclasses.replace(self.choices, precision=FP32)
            notes.append("precision is fp32, because bf16 failed when it was tried on this GPU.")
        with ranks.together():
            check_trusted(outcomes, self.choices.precision)
        saved = self.choices.executor
        if saved != "auto" and any(ranks.sum([saved not in candidates(device)])):
            self.choices = dataclasses.replace(self.choices, executor="auto")
            notes.append(f"The run had executor={saved} before, which has not passed on this GPU: it is chosen anew.")
        return notes

    def _probed(self) -> tuple[Evaluator, Batch, tuple[Feed, Feed | None, Feed | None], list[str]]:
        """Return the evaluator, a small batch, the feeds of training, validation and test data, and warnings.

        The evaluator has the template and the loss. All ranks have the same template.
        """
        with self.ranks.together():
            check_data(self.data.train, "the data set")
            if self._standardizes:
                weights = sample_weights(self.data.train, self.data.sample_weights, self.settings.sampling)
                statistics = target_statistics(self.data.train, self.arguments.loss, weights=weights)
                asked = self.arguments.standardize_targets is True
                self._make_model = standardizing(self._make_model, *statistics, asked)
            self._make_model = initialising(self._make_model, self.data.train, self.data.mean, self.data.std)
            template = seeded_model(self._make_model, self.settings.seed, self.init_from)
            template = self.optimizer.prepared(template).to(self.choices.device)
            given, device = self.arguments.loss, self.choices.device
            loss, self.data = settled_loss_of(given, template, self.data, self.settings, device)
            loss = StandardizedLoss(loss) if is_standardized(template) else loss
            train_feed, batch, loss, warnings = self._train_feed(template, loss)
            template = faithful_copy(template, self.choices.precision, batch, self.settings.channels_last)
            find_only_read(template, self.choices.precision, batch)
            evaluator = Evaluator(
                template, precision=self.choices.precision, loss=loss, metrics=self.metrics,
                batch_size=evaluation_batch_size(values_per_sample(batch.inputs)),
                max_batches=self.arguments.max_evaluation_batches, channels_last=self.settings.channels_last,
                class_names=self.data.names_of_classes, counts_classes=True,
            )  # fmt: skip
            validation_feed, test_feed = (
                None if source is None
                else evaluation_feed(what, source, evaluator, self.data, self.settings, self.choices, self.ranks)
                for what, source in (("validation", self.data.validation), ("test", self.data.test))
            )  # fmt: skip
        self._check_sizes(train_feed, validation_feed, test_feed)
        # Other libraries on a host, or a model that draws from other generators than torch's, may initialise otherwise.
        self.ranks.copy_first(value for value in template.state_dict().values() if value.is_floating_point())
        return evaluator, batch, (train_feed, validation_feed, test_feed), warnings

    def _check_sizes(self, *feeds: Feed | None) -> None:
        """Raise UserError on all ranks if they have data sets of different sizes."""
        every = self.ranks.gather([0 if feed is None else feed.num_samples for feed in feeds])
        if any(own != every[0] for own in every):
            sizes = " and ".join(f"{int(own[0])} and {int(own[2])}" for own in every)
            raise UserError(
                f"all ranks must have the same data sets, got {sizes} training and test samples; load them alike on "
                "every rank."
            )

    def _train_feed(self, template: nn.Module, loss: Loss) -> tuple[Feed, Batch, Loss, list[str]]:
        """Build the feed and probe the model with a small batch; in fp32 if `auto` chose bf16 and that fails."""
        data, settings, choices = self.data, self.settings, self.choices
        check_step(settings, num_samples(data.train))
        size = settings.samples_per_step
        feed = new_feed(data.train, size, data.augmentation, data, settings, choices, ranks=self.ranks)
        # No more samples than a batch: BatchNorm over single values, say, trains with two samples but not with one.
        batch = feed.first_samples(min(2, settings.batch_size))
        may_fall_back = settings.precision == "auto" and choices.precision != FP32
        try:
            if may_fall_back:
                feed.look_through(_FEW_ITEMS)
                if feed.rounded is not None:
                    raise UserError(feed.rounded.remark(choices.precision.compute))
            loss = settled_on_tokens(loss, template, choices.precision, batch)
            warnings = probe(
                template, choices.precision, batch, loss, *count_classes(data, loss),
                settings.label_smoothing, settings.compile_model, feed=feed,
                averages=settings.averages(self.rule, self.ranks.num_ranks), accumulate=settings.accumulate,
            )  # fmt: skip
            return feed, batch, loss, warnings
        except UserError as error:
            if not may_fall_back:
                raise
            reason, _, _ = str(error).partition("; ")  # without the remedy, which is being applied
        self.choices = dataclasses.replace(choices, precision=FP32)
        del feed  # it may hold the data on the device
        feed, batch, loss, warnings = self._train_feed(template, loss)
        return feed, batch, loss, [f"precision is fp32, because in bf16 {reason}.", *warnings]

    def _set_mixing(self, feed: Feed, batch: Batch, loss: Loss, evaluator: Evaluator) -> None:
        """Have the feed mix its batches, if that was asked for. Raises UserError if the run cannot train on them."""
        augmentation = self.data.augmentation
        if augmentation is None or not augmentation.mixes:
            return
        with self.ranks.together():
            check_mixable(augmentation, batch, feed.batch_size)
            if loss is not nn.functional.cross_entropy:
                given = "class_weights" if self.settings.class_weights is not None else "another loss"
                raise UserError(
                    f"{augmentation.shown_mixing} is for cross-entropy without weights, got {given}; leave that out, "
                    "or set data.mixup=0 data.cutmix=0."
                )
            width = evaluator.num_classes(feed)
            assert width is not None, "cross-entropy of one class a sample has scores of classes"
            feed.check_labels(Classes(width, ignored=None), "training")
        feed.mixing = Mixing(augmentation.mixup, augmentation.cutmix, self.settings.seed, width)

    def _independent(self, learner: int) -> nn.Module:
        """Return the model that an independent learner after the first begins with."""
        seed = counter_seed(self.settings.seed, "initialisation", 0, learner)
        return seeded_model(self._make_model, seed, self.init_from)

    def _shares_base(self, template: nn.Module) -> bool:
        """Return whether all learners have the same frozen parameters: independent ones may begin with others."""
        frozen = read_parameters(template)
        if self.rule.has_central_model or self.settings.num_learners == 1 or not frozen:
            return True
        if not only_reads(template):
            return False
        learners = range(1, self.settings.first_learners)
        others = (dict(self._independent(learner).named_parameters()) for learner in learners)
        return all(torch.equal(own.cpu(), other[name].cpu()) for other in others for name, own in frozen.items())

    def _choose_executor(
        self, template: nn.Module, update: TorchUpdate, feed: Feed, loss: Loss, shares_base: bool
    ) -> list[str]:
        """Take the executor that the first rank chooses. Returns its messages."""
        notes: list[str] = []

        def chosen() -> str:
            self.choices, found = choose_executor(
                template, self.settings, self.choices, update, feed, loss, self.announce, self.ranks.num_ranks,
                self.executor_cache, shares_base,
            )  # fmt: skip
            notes.extend(found)
            return self.choices.executor

        executor = self.ranks.from_first(chosen)
        if self.settings.executor == "auto" and self.choices.device.type == "cuda":
            with self.ranks.together():
                if executor not in candidates(self.choices.device):
                    raise UserError(
                        f"executor=auto took {executor} on the first rank, which has not passed on the GPU of rank "
                        f"{self.ranks.rank}; set executor=serial, or see what fails by python -m crossbow_py.check."
                    )
        self.choices = dataclasses.replace(self.choices, executor=executor)
        return notes

    def _bank(self, template: nn.Module, num_samples: int, shares_base: bool) -> tuple[ReplicaBank, AverageEMA | None]:
        settings, choices, rule, ranks = self.settings, self.choices, self.rule, self.ranks
        try:
            bank = new_bank(
                template, settings.first_learners, choices.executor, settings, choices, self.optimizer,
                num_devices=ranks.num_ranks, device_index=ranks.rank, has_velocity=rule.has_velocity,
                has_corrections=rule.has_central_model, gradient_mean=rule.gradient_mean, shares_base=shares_base,
            )  # fmt: skip
            return bank, None if rule.average_ema is None else AverageEMA(bank, rule.average_ema * num_samples)
        except (RuntimeError, MemoryError) as error:  # torch raises these when memory runs out, on CUDA too
            raise UserError(
                f"num_learners={settings.num_learners} replicas of this model cannot be allocated on {choices.device} "
                f"({one_line(error)[:200]}); lower num_learners."
            ) from error


def settled_loss_of(
    given: Loss | None, template: nn.Module, data: DataSets, settings: RunSettings, device: torch.device
) -> tuple[Loss, DataSets]:
    """Return the loss, on the device, and the data.

    If the loss is the model's own, which the data decide where none was given, the model gets labels. Raises UserError
    if the model and the data cannot have such a loss.
    """
    fits = takes_labels(template) and has_named_inputs(data.train)
    loss = given or (model_loss if fits else nn.functional.cross_entropy)
    if loss is model_loss:
        if not fits:
            raise UserError(
                "loss=model_loss is for models whose forward takes `labels`, and data whose inputs are dicts; give "
                "another loss."
            )
        if settings.label_smoothing or settings.class_weights is not None:
            raise UserError(
                "label_smoothing and class_weights are for cross-entropy, and the model computes its loss itself; "
                "leave them out, or give loss=nn.functional.cross_entropy."
            )
        data = dataclasses.replace(data, labels_as_input=True)
    settled = loss_on(device, loss)
    if settled is nn.functional.cross_entropy:
        _check_targets(data.train, takes_labels(template))
    return settled, data


def _check_targets(data: Data, may_shift: bool) -> None:
    """Raise UserError for targets in tensors that cross-entropy would take for something else than what was meant."""
    pair = as_pair(data)
    if pair is None:
        return
    inputs, targets = pair
    if targets.is_floating_point() and targets.ndim > 1 and targets.shape[1] > 1 and (reason := not_shares(targets)):
        raise UserError(reason)
    if may_shift and has_integers(targets) and isinstance(inputs, Tensor) and torch.equal(inputs, targets):
        raise UserError(
            "the targets are the inputs, which a model can copy; have the model shift them itself, by a dict of inputs "
            '("input_ids": ids, "labels": ids), or give inputs ids[:, :-1] and targets ids[:, 1:].'
        )


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
        with_labels(source) if data.labels_as_input else source,
        batch_size,
        settings.seed,
        choices.device,
        augmentation,
        data.mean,
        data.std,
        settings.channels_last,
        choices.precision.compute,
        kernels=choices.device.type == "cuda" and _no_kernel(choices) is None,
        num_workers=first_workers(settings.num_workers, choices.device, training, ranks.num_local),
        num_ranks=ranks.num_ranks if training else 1,
        order_seed=settings.order_seed,
        sample_weights=sample_weights(source, data.sample_weights, settings.sampling) if training else None,
    )


def evaluation_feed(
    what: str,
    source: Data,
    evaluator: Evaluator,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    ranks: Ranks = ALONE,
) -> Feed:
    """Build the feed of the `what` ("test", "validation" or "new") data of a run, `source`, to evaluate models on.

    Raises UserError for data that do not fit the model, the loss or the metrics.
    """
    check_data(source, f"the {what} data")
    if data.labels_as_input and not has_named_inputs(source):
        raise UserError(f"the {what} data must have dicts of inputs, as the training data have; name them alike.")
    feed = new_feed(source, 1, None, data, settings, choices, training=False, ranks=ranks)
    probe_evaluation(
        evaluator.template, evaluator.precision, feed.first_samples(2), evaluator.loss, what, evaluator.metrics, feed,
        evaluator.class_names, ranks.num_ranks,
    )  # fmt: skip
    return feed


def check_step(settings: RunSettings, num_samples: int) -> None:
    """Raise UserError if a learner's step takes more samples than there are. A batch alone is the feed's to check."""
    if settings.accumulate > 1 and settings.samples_per_step > num_samples >= settings.batch_size:
        raise UserError(
            f"accumulate={settings.accumulate} takes {settings.samples_per_step} samples a step with "
            f"batch_size={settings.batch_size}, and the data set has {num_samples}; set at most "
            f"accumulate={num_samples // settings.batch_size}."
        )


def _of_evaluations(evaluator: Evaluator, feeds: Mapping[str, Feed | None]) -> list[str]:
    """Return which data sets are evaluated in part."""
    most = evaluator.batch_size * (evaluator.max_batches or 0)
    return [
        f"Evaluations are on the first {most:,} of {feed.num_samples:,} {name} samples "
        f"(max_evaluation_batches={evaluator.max_batches})."
        for name, feed in feeds.items()
        if feed is not None and 0 < most < feed.num_samples
    ]


def _of_micro_batches(settings: RunSettings, template: nn.Module) -> list[str]:
    """Return a message if gradients are added, and the model takes statistics over batches."""
    normalises = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in template.modules())
    if settings.accumulate == 1 or not normalises:
        return []
    return [
        f"BatchNorm takes its statistics over micro-batches of {settings.batch_size}, {settings.accumulate} times a "
        "step: gradients are not those of the whole batch."
    ]


def _refusals(choices: Choices) -> list[str]:
    """Return the reason why kernels do not make batches of fused rounds on CUDA, if there is one."""
    fuses = choices.executor == "auto" or EXECUTORS[choices.executor].FUSES
    return list(filter(None, [_no_kernel(choices)])) if choices.device.type == "cuda" and fuses else []


def _no_kernel(choices: Choices) -> str | None:
    """Return why no kernel makes batches that are part of a graph, as in fused rounds and in those of streams."""
    if choices.executor not in ("auto", "streams") and not EXECUTORS[choices.executor].FUSES:
        return "batches are no part of a graph"
    return serves("batches", choices.device, choices.precision.compute)


def count_classes(data: DataSets, loss: Loss) -> tuple[int | None, bool]:
    """Return the number of classes, None if unknown, and whether it is exact.

    If it was not given, it is at least the largest target of the training tensors plus one.
    """
    if plain_loss(loss) is not nn.functional.cross_entropy:
        return None, False
    pair = as_pair(data.train)
    if data.num_classes is not None or pair is None or pair[1].ndim != 1 or not has_integers(pair[1]):
        return data.num_classes, True
    return int(pair[1].max()) + 1, False
