"""The registry of a search's trials: their settings, which can share a pack, and how wide packs are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from crossbow_py.core.errors import CrossbowError, DataError, DeviceLostError, UserError, one_line, text_of
from crossbow_py.core.trees import Tree, call, values_per_sample
from crossbow_py.data.datasets import Classes
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.mixing import check_mixable
from crossbow_py.engine.bank.frozen_base import frozen_parameters, frozen_values, only_reads, share_frozen
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory, raise_if_lost
from crossbow_py.engine.modules.losses import Loss, TokenLoss, has_tokens, model_loss, plain_loss
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.packs.pack import TrialRow
from crossbow_py.packs.padding import Padding, family, padding_for
from crossbow_py.packs.policies import Waiting
from crossbow_py.packs.trial import Checkpoint, Row, TrialSettings, new_row, own_dropout_rate, signature
from crossbow_py.packs.width import BUDGET_S, SHARE, CompatibleTrials, Width, check_features, measured_width
from crossbow_py.train.checks.probe import find_only_read, probe, probe_evaluation, settled_on_tokens, takes_labels
from crossbow_py.train.checks.seeded_model import faithful_copy
from crossbow_py.train.evaluation.evaluator import Evaluator, evaluation_batch_size
from crossbow_py.train.evaluation.metrics import Metric
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.calibration import Effort

_APART = "apart"  # ends the keys of trials whose frozen parameters are each their own
MakeTrial = Callable[[int, Mapping[str, Any]], TrialSettings]


@dataclass(frozen=True)
class TrialData:
    """The data of trials, on the device.

    Attributes:
        feed_of: makes a feed of training batches of a size, to be closed; raises UserError for an impossible size.
        num_samples: N, the samples of an epoch.
        validation, test: the data that trials are measured on, and the best one at the end.
        num_classes: the number of outputs that models need, and whether it must be exact.
        streams: whether samples are loaded while trials train; then all trials of a pack should be at the same ones.
        loss: what all trials minimise; label smoothing is a trial's own.
    """

    feed_of: Callable[[int], Feed]
    num_samples: int
    validation: Feed
    test: Feed | None
    num_classes: tuple[int | None, bool]
    streams: bool = False
    loss: Loss = nn.functional.cross_entropy

    @property
    def measured_on(self) -> str:
        """What messages call `validation`, which may be the test data."""
        return "test" if self.validation is self.test else "validation"


@dataclass(frozen=True)
class Kind:
    """The template and the pack width that trials of one signature share.

    `num_outputs` is that of models whose batches are mixed, else None. Frozen parameters are the same for all trials if
    they share a base.
    """

    template: nn.Module
    width: Width
    num_outputs: int | None = None
    shares_base: bool = True


@dataclass(frozen=True)
class Described:
    """A trial that can train, in packs of a signature, on the rows of whose model it may have to be padded."""

    settings: TrialSettings
    signature: str
    dropout_rate: float
    padding: Padding | None = None
    first: Row | None = None  # what it begins with, if most of the model is frozen and so need not be made again

    def row(self, trial: int, begun: Checkpoint | None, end_samples: int, planned_samples: int) -> TrialRow:
        """Return a row for it."""
        first = None if begun is not None else self.first
        return TrialRow(
            trial, self.settings, begun, end_samples, planned_samples, self.dropout_rate, self.padding, first
        )


def _is_mostly_frozen(model: nn.Module) -> bool:
    return sum(map(torch.numel, frozen_parameters(model).values())) > sum(map(torch.numel, model.parameters())) / 2


class TrialRegistry:
    """The registry of trials: describes each of them once, on demand.

    Args:
        make_trial: makes a trial's settings from its number and parameters.
        most: the most trials side by side.
        announce: takes sentences for the user: before what takes long, and what was found.
        total_samples: the samples of the whole search; measuring packs may take a quarter of their time.
        metrics: further metrics of evaluations.
        pads: whether a model may train in packs of a wider one that came before it.

    Attributes:
        settings, choices: those of all trials.
        stopped: returns whether the search is to end, so that nothing should be measured any more.
        is_alone: whether no other worker on this host shares the search now, as others disturb measurements.
        has_packs: returns whether packs hold memory.
        make_room: frees memory that packs hold, until they take it again; returns whether there was any.
    """

    def __init__(
        self, make_trial: MakeTrial, data: TrialData, settings: RunSettings, choices: Choices,
        most: int, announce: Callable[[str], None], total_samples: int | None = None,
        metrics: Mapping[str, Metric] | None = None, pads: bool = False,
    ) -> None:  # fmt: skip
        self._make_trial, self.data = make_trial, data
        self.settings, self.choices = settings, choices
        self._metrics, self._pads = metrics or {}, pads
        self._most, self._announce, self._total_samples = most, announce, total_samples
        self.stopped: Callable[[], bool] = lambda: False
        self.is_alone = True
        self.has_packs: Callable[[], bool] = lambda: False
        self.make_room: Callable[[], bool] = lambda: False
        self._measuring_s, self._fastest = 0.0, 0.0
        self._frozen: dict[str, list[str]] = {}  # values of the trials so far, by what else they have in common
        self._templates: WeakSet[nn.Module] = WeakSet()  # equal frozen values of all of them are there once
        self._described: dict[int, Described | str] = {}
        self._kinds: dict[str, Kind] = {}
        self._families: dict[str, list[str]] = {}  # signatures of kinds whose models differ in width alone
        self._paddings: dict[str, tuple[str, Padding]] = {}  # signatures that train in packs of another

    def of(self, trial: int, params: Mapping[str, Any]) -> Described | str:
        """Return what is known of a trial, or a sentence on why it cannot train.

        Raises:
            DataError: the data cannot be loaded.
            DeviceLostError: the device does nothing any more.
        """
        if trial not in self._described:
            try:
                settings = self._make_trial(trial, params)
                model = settings.new_model()
                key = self._key(settings, model)
                if key not in self._kinds and key not in self._paddings:
                    self._add(key, settings, model)
                key, padding = self._paddings.get(key, (key, None))
                shares = self._kinds[key].shares_base and _is_mostly_frozen(model)
                first = {**new_row(model), "frozen": {}} if shares else None
                self._described[trial] = Described(settings, key, own_dropout_rate(model) or 0.0, padding, first)
            except (DataError, DeviceLostError):
                raise
            except Exception as error:  # of the user's model
                raise_if_lost(error, self.choices.device)
                is_said = isinstance(error, CrossbowError)
                self._described[trial] = text_of(error) if is_said else one_line(error)
        return self._described[trial]

    def _key(self, settings: TrialSettings, model: nn.Module) -> str:
        """Return the signature, with the values of frozen parameters: trials that share them have packs of their own.

        Those whose values no trial before has had are in packs in which each holds its own.
        """
        alike, values = signature(settings, model), frozen_values(model)
        if values is None:
            return alike
        seen = self._frozen.setdefault(alike, [])
        seen.append(values)
        return f"{alike} {values if seen[0] == values or seen.count(values) > 1 else _APART}"

    def check(self, params: Mapping[str, Any]) -> None:
        """Build the model and take small batches through it. Raises UserError, or what the user's model raises."""
        settings = self._make_trial(0, params)
        model = settings.new_model().to(self.choices.device)
        settings.optimizer.matrices(model)
        with closing(self.data.feed_of(settings.batch_size)) as feed:
            batch = feed.first_samples(min(2, settings.batch_size))
            _check_loss(self.data.loss, model, batch, self.choices.precision)
            needs = (self.data.loss, *self.data.num_classes, settings.label_smoothing)
            probe(model, self.choices.precision, batch, *needs)
        if self._metrics:
            few = self.data.validation.first_samples(2)
            probe_evaluation(model, self.choices.precision, few, self.data.loss, self.data.measured_on, self._metrics)

    def waiting(self, trial: int, described: Described, alone: bool, sample: int) -> Waiting:
        """Return a trial as policies see it; one that trains alone, or is at an unknown `sample` (-1), fits with none.

        `sample` is where it trains, or goes on; streamed samples are for those that are at the same one.
        """
        key = described.signature
        share = 1.0 if alone else 1 / self._kinds[key].width.size
        name = f"{key} {trial}" if alone else key
        if self.data.streams and not alone:
            name = f"{key} {trial if sample < 0 else f'at {sample}'}"
        return Waiting(trial, name, described.settings.batch_size, described.settings.features, share)

    def _add(self, key: str, settings: TrialSettings, model: nn.Module) -> None:
        """Have trials of a signature train in packs of a wider model, else in packs of their own."""
        own = family(settings, model) if self._pads or settings.wider else None
        if own is not None:
            with closing(self.data.feed_of(settings.batch_size)) as feed:
                inputs = feed.first_samples(min(8, settings.batch_size)).inputs
            model = model.to(self.choices.device)
            for wide in settings.wider:
                if self._is_padded(key, model, own, inputs, wide):
                    return
            for other in self._families.get(own, ()):
                if key.endswith(_APART) is not other.endswith(_APART):
                    continue
                if (padding := padding_for(model, self._kinds[other].template, inputs)) is not None:
                    self._pad(key, other, padding)
                    return
        self._kinds[key] = self._new_kind(settings, model, not key.endswith(_APART))
        if own is not None and self._pads:
            self._families.setdefault(own, []).append(key)

    def _is_padded(self, key: str, model: nn.Module, own: str, inputs: Tree, settings: TrialSettings) -> bool:
        """Have trials of a signature train in packs of a wider model, if they can; returns whether."""
        try:
            wide = settings.new_model().to(self.choices.device)
        except Exception:  # of the user's model, which no trial asked for
            return False
        if family(settings, wide) != own or (padding := padding_for(model, wide, inputs)) is None:
            return False
        # Of frozen values, which differ between the trials of a key that ends so, each has its own there, too.
        other = " ".join([signature(settings, wide), *key.split()[1:]])
        if other not in self._kinds:
            self._kinds[other] = self._new_kind(settings, wide, not other.endswith(_APART))
        self._pad(key, other, padding)
        return True

    def _pad(self, key: str, other: str, padding: Padding) -> None:
        self._paddings[key] = other, padding
        self._announce(padding.sentence)

    def _new_kind(self, settings: TrialSettings, model: nn.Module, shares_base: bool = True) -> Kind:
        """Describe a new kind; if memory is short beside the packs, again without them."""
        try:
            return self._measured_kind(settings, model, shares_base)
        except Exception as error:
            if not (is_out_of_memory(error) and self.make_room()):
                raise
        free_memory(self.choices.device)
        return self._measured_kind(settings, model, shares_base)

    def _measured_kind(self, settings: TrialSettings, model: nn.Module, shares_base: bool) -> Kind:
        with closing(self.data.feed_of(settings.batch_size)) as feed:
            template = self._template(settings, model.to(self.choices.device), feed)
            find_only_read(template, self.choices.precision, feed.first_samples(min(2, settings.batch_size)))
            self.hold_once(template)
            is_apart = not shares_base
            shares_base = shares_base and (only_reads(template) or not frozen_parameters(template))
            num_outputs = self._num_mixed(settings, template, feed)
            trials = CompatibleTrials(
                self.settings, self.choices, settings, template, feed, self.data.loss, shares_base
            )
            check_features(trials)
            effort = Effort(BUDGET_S, self._total_samples, self._measuring_s, self.stopped, self.is_alone, SHARE)
            if self._fastest and effort.seconds(self._fastest) <= 0:  # those before have left nothing
                effort = replace(effort, budget_s=0.0)
            begun = time.perf_counter()
            try:
                width, notes = measured_width(
                    trials, self._most, self._announce, self.has_packs(), self.make_room, effort
                )
            finally:
                self._measuring_s += time.perf_counter() - begun
        self._fastest = max(self._fastest, *width.rates.values())
        count = sum(map(torch.numel, frozen_parameters(template).values()))
        if count and shares_base:
            notes = [*notes, f"{count:,} frozen values are held once for all trials of a pack."]
        if count and is_apart:
            remedy = "load them from a file, or draw them by a seed of their own"
            notes = [*notes, f"{count:,} frozen values differ from trial to trial, and each holds its own; {remedy}."]
        for note in (*notes, width.sentence):
            self._announce(note)
        return Kind(template, width, num_outputs, shares_base)

    def _template(self, settings: TrialSettings, template: nn.Module, feed: Feed) -> nn.Module:
        """Return a model as packs copy it, once a batch went through it in training and in evaluation."""
        batch = feed.first_samples(min(2, settings.batch_size))
        _check_loss(self.data.loss, template, batch, self.choices.precision)
        needs = (self.data.loss, *self.data.num_classes, settings.label_smoothing)
        for note in probe(template, self.choices.precision, batch, *needs, feed=feed):
            self._announce(note)
        template = faithful_copy(template, self.choices.precision, batch, self.settings.channels_last)
        validation = self.data.validation
        few = validation.first_samples(2)
        probe_evaluation(
            template, self.choices.precision, few, self.data.loss, self.data.measured_on, self._metrics, validation
        )
        return template

    def _num_mixed(self, settings: TrialSettings, template: nn.Module, feed: Feed) -> int | None:
        """Return the number of outputs, if batches are mixed. Raises UserError if the trial cannot train on them."""
        own = settings.augmentation
        if not own.mixes:
            return None
        check_mixable(own, feed.first_samples(2), settings.batch_size)
        if plain_loss(self.data.loss) is not nn.functional.cross_entropy:
            raise UserError(f"{own.shown_mixing} is for cross-entropy, got another loss; set mixup and cutmix to 0.")
        width = self.evaluator(template).num_classes(feed)
        assert width is not None, "cross-entropy of one class a sample has scores of classes"
        feed.check_labels(Classes(width, ignored=None), "training")
        return width

    def evaluator(self, template: nn.Module) -> Evaluator:
        """Return an evaluator of the trials of an architecture, which runs copies of the template."""
        self.hold_once(template)
        inputs = self.data.validation.first_samples(1).inputs
        return Evaluator(
            template, precision=self.choices.precision, loss=self.data.loss, metrics=self._metrics,
            batch_size=evaluation_batch_size(values_per_sample(inputs)), channels_last=self.settings.channels_last,
        )  # fmt: skip

    def hold_once(self, template: nn.Module) -> None:
        """Have a template hold what is frozen in the memory of another, if it is the same there; see `share_frozen`."""
        if template not in self._templates:
            share_frozen(template, self._templates)
            self._templates.add(template)

    def template(self, key: str) -> nn.Module:
        """Return a model of a signature, on the device."""
        return self._kinds[key].template

    def num_outputs(self, key: str) -> int | None:
        """Return C of a signature's models, if their batches are mixed; else None."""
        return self._kinds[key].num_outputs

    def shares_base(self, key: str) -> bool:
        """Return whether a signature's trials share their frozen parameters."""
        return self._kinds[key].shares_base

    def executor(self, key: str, num_trials: int) -> str:
        """Return the executor for that many trials of a signature."""
        return self._kinds[key].width.executor(num_trials)

    def narrow(self, key: str, size: int) -> None:
        """Make the packs of a signature smaller, as memory did not hold more than `size` trials."""
        kind = self._kinds[key]
        self._kinds[key] = replace(kind, width=replace(kind.width, size=max(1, size)))


def _check_loss(loss: Loss, model: nn.Module, batch: Batch, precision: Precision) -> None:
    """Refuse a model of tokens that computes its loss itself, as it may shift them, and as many tokens as classes."""
    if loss is model_loss:
        return
    if takes_labels(model) and isinstance(batch.inputs, Mapping) and batch.targets.ndim > 1:
        raise UserError(
            "a search trains by cross-entropy, and this model computes its own loss from labels of tokens; use others."
        )
    settled = settled_on_tokens(loss, model, precision, batch)
    if isinstance(settled, TokenLoss) and not has_tokens(loss, call(model.eval(), batch.inputs), batch.targets):
        raise UserError(f"{batch.targets.shape[1]} tokens cannot be told from as many classes; change data.context.")
