"""Builds the parts of a run: feeds, bank, evaluator; tries them on small batches before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossbow_py.averaging import AveragingRule, OuterStep, Stage
from crossbow_py.averaging.collective import Collective
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data, as_pair
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.feeds import make_feed
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.average_ema import AverageEMA
from crossbow_py.engine.dropout import counter_seed
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.kernel_checks import serves
from crossbow_py.engine.optimizers import Optimizer, for_learner
from crossbow_py.engine.outer_step import take_outer_step
from crossbow_py.engine.precision import FP32
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.engine.rounds import Loss, Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update import TorchUpdate, choose_update
from crossbow_py.errors import UserError
from crossbow_py.evaluation import Evaluation, Evaluator, Metric, State, evaluation_batch_size, mean_evaluation
from crossbow_py.executor_choice import new_bank, settle_executor
from crossbow_py.learner_bound import learner_bound
from crossbow_py.probe import probe, probe_evaluation
from crossbow_py.run_settings import Choices, RunSettings
from crossbow_py.seeded_model import MakeModel, seeded_model
from crossbow_py.supply import first_workers
from crossbow_py.targets import one_line
from crossbow_py.telemetry.timeline import Timeline


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


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built once by the trainer.

    `warnings` are sentences for the user; the `timeline`, when there is one, gets a span of every task. `most_learners`
    is how many memory holds, no more than the settings allow; `ranks` are those of the run, and `nodes` their
    `Ranks.nodes`, when nodes have an average model each. `average_ema` is there when the rule asks for it.
    """

    choices: Choices
    bank: ReplicaBank
    average_ema: AverageEMA | None
    update: TorchUpdate
    loss: Loss
    evaluator: Evaluator
    train_feed: Feed
    validation_feed: Feed | None
    test_feed: Feed | None
    collective: Collective
    warnings: list[str]
    timeline: Timeline | None
    compile_model: bool
    most_learners: int
    ranks: Ranks
    nodes: list[int] | None
    label_smoothing: float

    @property
    def rule(self) -> AveragingRule:
        """The averaging rule."""
        return self.update.rule

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.update.optimizer

    def new_executor(self, seed: int) -> Executor:
        """Task bodies and the executor over the bank. It may start threads: close it."""
        executor = EXECUTORS[self.choices.executor](self._tasks(seed))
        if self.timeline is not None:
            executor.trace(self.timeline)
        self.ranks.watch.running = executor.running
        return executor

    def _tasks(self, seed: int) -> RoundTasks:
        return RoundTasks(
            self.bank,
            update=self.update,
            feed=self.train_feed,
            loss=self.loss,
            seed=seed,
            collective=self.collective,
            compile_model=self.compile_model,
            label_smoothing=smoothing_rows(self.label_smoothing, self.bank),
        )

    def plan(self, index: int, cursor: int, factor: float, rounds_apart: int = 1) -> Round:
        """Round `index` from stream position `cursor`: which batch and learning rate each learner gets.

        For `factor` and `rounds_apart` see `Stage`.
        """
        learners, batch_size = range(self.bank.num_learners), self.train_feed.batch_size
        own = cursor + self.bank.first_learner * batch_size
        devices = self.collective.num_devices
        rate = factor * self.rule.rate_scale(self.bank.total_learners, self.bank.num_devices)
        rates = tuple(for_learner(self.optimizer.learning_rate, j) * rate for j in learners)
        return Round(
            index=index,
            starts=tuple(own + j * batch_size if self.rule.has_central_model else cursor for j in learners),
            learning_rates=rates,
            together=self.rule.round(Stage(index, len(learners) * devices, rates[0], factor, rounds_apart, devices)),
            joins_nodes=self.collective.apart and self.rule.joins_nodes(index),
        )

    def sit_out(self, plan: Round) -> None:
        """Take part in a round without learners of this device: nothing is added to the sum, and z moves alike.

        The executor is closed or drained.
        """
        if plan.averaging is not None:
            self.bank.total.zero_row(0)
            self._tasks(seed=0).move(RoundOutcome(plan))
        elif plan.outer_step is not None:
            self.take_outer_step(plan.outer_step, sits_out=True)
        elif self.bank.replicas_alike:
            self._tasks(seed=0).step_by_others(RoundOutcome(plan))

    def settle(self) -> None:
        """Once nothing is in flight: z is one of the learners, where they are alike."""
        if self.bank.replicas_alike:
            self.bank.adopt_learner()

    def take_outer_step(self, step: OuterStep, sits_out: bool = False) -> None:
        """See `engine/outer_step.py`; drained, all ranks together."""
        take_outer_step(self.bank, step, self.collective, self.ranks.adder, sits_out=sits_out)

    def restart(self) -> None:
        """Restart the learners from z, when nothing is in flight; see `SMA.restart_momentum`. All ranks together."""
        self.bank.restart(self.rule.restart_momentum, self.ranks.adder)

    @property
    def feeds(self) -> list[Feed]:
        """Of training, validation and test data."""
        return [feed for feed in (self.train_feed, self.validation_feed, self.test_feed) if feed is not None]

    def feed_notes(self) -> list[str]:
        """What the feeds have to tell the user since the last call."""
        return [note for feed in self.feeds for note in feed.take_notes()]

    def close_feeds(self) -> None:
        """End the threads and processes of all feeds."""
        for feed in self.feeds:
            feed.close()

    def final_states(self, cursor: int, excluded: Sequence[int] = (), ema: bool = True) -> list[State]:
        """State dicts of what a run produces: the average model or its EMA, or every independent learner.

        Args:
            cursor: samples seen, from where in the stream recalibration takes its training batches.
            excluded: this device's learners whose BatchNorm statistics are not to be used.
            ema: take the EMA, where there is one.

        All ranks call it together, and have the same.
        """
        if not self.rule.has_central_model:
            return [self.bank.learner_state(learner) for learner in range(self.bank.num_learners)]
        state = self._central_state(excluded)
        if self.average_ema is not None and ema:
            state = self.average_ema.at(state, cursor)
        if self.rule.batch_norm == "recalibrate":
            share = range(self.ranks.rank, self.rule.recalibration_batches, self.ranks.num_ranks)
            starts = (cursor + number * self.train_feed.batch_size for number in share)
            inputs = (self.train_feed.batch(start).inputs for start in starts)
            state = self.evaluator.recalibrate(state, inputs, self.ranks)
        return [state]

    def _central_state(self, excluded: Sequence[int]) -> State:
        """State dict of z, where nodes have one each of their mean."""
        state = self.bank.central_state(excluded, self.ranks.adder)
        if not self.collective.apart:
            return state
        z = self.bank.new_flat()
        z.copy_row(0, self.bank.z)
        self.collective.mean_over_nodes(z.storage)
        return {**state, **z.shaped()}

    def move_ema(self, samples: int, excluded: Sequence[int] = ()) -> None:
        """Let the EMA of z follow it after so many samples; drained, all ranks together. For `excluded` see above."""
        assert self.average_ema is not None, "nothing asks for an EMA"
        self.average_ema.move(self._central_state(excluded), samples)

    def evaluate(
        self, feed: Feed, cursor: int, excluded: Sequence[int] = ()
    ) -> tuple[Evaluation, tuple[Evaluation, ...]]:
        """What stops look at, and each learner's evaluation when they are independent (the first is their mean).

        All ranks call it together; each measures a share of the samples.
        """
        states = self.final_states(cursor, excluded)
        each = tuple(self.evaluator.evaluate(state, feed, self.ranks) for state in states)
        return (each[0], ()) if self.rule.has_central_model else (mean_evaluation(each), each)


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
) -> Parts:
    """Build a run's parts, once small batches of every data set went through the model. Raises UserError.

    `announce` is given a sentence before what takes long. All ranks call it together, and what `auto` becomes on the
    first is taken by all.
    """
    with ranks.together():
        template = seeded_model(make_model, settings.seed, init_from).to(choices.device)
        choices, train_feed, batch, warnings = _train_feed(template, data, settings, choices, loss, ranks)
        validation_feed, test_feed = (
            _evaluation_feed(what, template, source, data, settings, choices, loss, ranks)
            for what, source in (("validation", data.validation), ("test", data.test))
        )
    # Hosts' libraries, or a model that draws from other generators than torch's, may have made another of it.
    ranks.copy_first(value for value in template.state_dict().values() if value.is_floating_point())
    update, warning = choose_update(optimizer, rule, choices.device, choices.precision.master)
    warnings += [warning] if warning else []
    notes: list[str] = []

    def settled() -> str:
        found, said = settle_executor(template, settings, choices, update, train_feed, loss, announce, ranks.num_ranks)
        notes.extend(said)
        return found.executor

    choices = dataclasses.replace(choices, executor=ranks.from_first(settled))
    with ranks.together():
        most_learners, bounded = learner_bound(template, batch, settings, choices, loss, optimizer, rule)
        bank, average_ema = _bank(template, settings, choices, optimizer, rule, train_feed.num_samples, ranks)
    most_learners = min(int(each) for (each,) in ranks.gather([most_learners]))
    if not rule.has_central_model:
        _begin_apart(bank, make_model, settings.seed, init_from)
    evaluator = Evaluator(
        template, precision=choices.precision, loss=loss, metrics=metrics, max_batches=max_evaluation_batches,
        batch_size=evaluation_batch_size(batch.inputs[0].numel()), channels_last=settings.channels_last,
    )  # fmt: skip
    # Why kernels do not make batches, where one would expect it.
    refusal = _no_batch_kernels(choices) if choices.device.type == "cuda" else None
    warnings += [*notes, *bounded, *([refusal] if refusal else [])]
    collective = ranks.collective(choices.device, apart=rule.node_period > 1)
    return Parts(
        choices, bank, average_ema, update, loss, evaluator, train_feed, validation_feed, test_feed,
        collective, warnings, timeline, settings.compile_model, most_learners, ranks,
        ranks.nodes() if collective.apart else None, settings.label_smoothing,
    )  # fmt: skip


def smoothing_rows(share: float, bank: ReplicaBank) -> Tensor | None:
    """The label smoothing of every row of a bank; None for none."""
    return torch.full((bank.capacity,), share, dtype=bank.precision.master, device=bank.device) if share else None


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
    template: nn.Module, data: DataSets, settings: RunSettings, choices: Choices, loss: Loss, ranks: Ranks
) -> tuple[Choices, Feed, Batch, list[str]]:
    """The feed of training batches, tried on a small one; where `auto` took bf16 and the model cannot, it is fp32."""
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    # Not more than a batch: BatchNorm on single values, for one, trains with two samples and not with one.
    batch = feed.first_samples(min(2, settings.batch_size))
    classes = count_classes(data, loss)
    try:
        return choices, feed, batch, probe(template, choices.precision, batch, loss, *classes)
    except UserError as error:
        if settings.precision != "auto" or choices.precision == FP32:
            raise
        reason = str(error)
    choices = dataclasses.replace(choices, precision=FP32)
    feed = new_feed(data.train, settings.batch_size, data.augmentation, data, settings, choices, ranks=ranks)
    batch = feed.first_samples(min(2, settings.batch_size))
    warnings = probe(template, FP32, batch, loss, *classes)
    return choices, feed, batch, [f"precision is fp32, because in bf16 {reason}", *warnings]


def _evaluation_feed(
    what: str,
    template: nn.Module,
    source: Data | None,
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    loss: Loss,
    ranks: Ranks,
) -> Feed | None:
    if source is None:
        return None
    feed = new_feed(source, 1, None, data, settings, choices, training=False, ranks=ranks)
    probe_evaluation(template, choices.precision, feed.first_samples(2), loss, what)
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
        kernels=choices.device.type == "cuda" and _no_batch_kernels(choices) is None,
        num_workers=first_workers(settings.num_workers, choices.device, training, ranks.num_local),
        num_ranks=ranks.num_ranks if training else 1,
        order_seed=settings.order_seed,
    )


def _no_batch_kernels(choices: Choices) -> str | None:
    return serves("batches", choices.device, choices.precision.compute)


def count_classes(data: DataSets, loss: Loss) -> tuple[int | None, bool]:
    """As given, exactly; else at least one more than the largest target of training tensors. None: none to count."""
    if loss is not nn.functional.cross_entropy:
        return None, False
    pair = as_pair(data.train)
    if data.num_classes is not None or pair is None or pair[1].ndim != 1 or pair[1].is_floating_point():
        return data.num_classes, True
    return int(pair[1].max()) + 1, False
