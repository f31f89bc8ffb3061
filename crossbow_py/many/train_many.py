"""`train_many`: many models from one call, each with its own seed, samples, optimizer and end."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.cli.output_folder import make_folder
from crossbow_py.core.digest import digest_of
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path, locked
from crossbow_py.core.host import read_host
from crossbow_py.core.signals import StopSignal
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Classes, Data, as_pair, check_data, in_tensors, num_samples
from crossbow_py.data.feed import Feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.data.streaming.items import loaded
from crossbow_py.data.streaming.streamed_data import StreamedData
from crossbow_py.engine.bank.frozen_base import frozen_parameters
from crossbow_py.engine.modules.losses import IGNORED, Loss, plain_loss, takes_classes
from crossbow_py.engine.modules.precision import FP32, ordinary_modes
from crossbow_py.engine.modules.standardized import StandardizedLoss, is_standardized, standardizing
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.many.loop import Hooks, ManyLoop, Plan
from crossbow_py.many.members import Ids, Member, Settled, Study, settled
from crossbow_py.many.results import MemberResult, Results
from crossbow_py.many.selection import greedy_selection
from crossbow_py.many.store import Store
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.trial_registry import TrialData, TrialRegistry
from crossbow_py.train.arguments import check_keywords, default_optimizer, rule_of
from crossbow_py.train.build import count_classes, new_feed, settled_loss_of
from crossbow_py.train.checkpoints.weights import is_adapter, save_adapter
from crossbow_py.train.checks.losses import remarks_on_targets, standardizes, target_statistics
from crossbow_py.train.checks.seeded_model import MakeModel, initialising, remarks_on_starts, seeded_model
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, Tally
from crossbow_py.train.evaluation.metrics import Metric, checked_metrics
from crossbow_py.train.ladder.ladder import check_trusted, try_once
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_settings import Choices, JobSettings, RunSettings, StopConditions, choose
from crossbow_py.train.schedules import Constant, DefaultSchedule, Schedule

LOCK_FILE = ".many.lock"
ADAPTERS_FOLDER = "adapters"
_LONGEST_NAME = 100
_MEMORY_SHARE = 0.5  # of the host's, for data that are read from items
P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class ManyArguments(JobSettings):
    """The arguments of `train_many`, whose docstring explains them. Raises UserError for those that cannot be."""

    model: MakeModel
    train_data: Data
    test_data: Data | None = None
    _: KW_ONLY
    members: int | Iterable[Member]
    validation_data: Data | None = None
    batch_size: int = 32
    max_epochs: float = 10.0
    max_rounds: int | None = None
    optimizer: Optimizer | str | None = None
    schedule: Schedule | str | None = None
    loss: Loss | None = None
    standardize_targets: bool | Literal["auto"] = "auto"
    metrics: Mapping[str, Metric] | None = None
    augmentation: Augmentation | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    num_classes: int | None = None
    patience: int | None = None
    restore_best: bool = False
    evaluations_per_epoch: int = 1
    max_pack_size: int = 256
    output_dir: str | Path | None = None
    checkpoint_every_s: float | None = 60.0
    progress: Callable[[ManyLoop], None] | None = None
    message: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        RunSettings.of(self, num_learners=1)  # which checks its keys, as the next does
        StopConditions(
            max_epochs=self.max_epochs, max_rounds=self.max_rounds, patience=self.patience,
            restore_best=self.restore_best,
        )  # fmt: skip
        given: Any = self.members
        if isinstance(given, Iterable) and not isinstance(given, str):
            object.__setattr__(self, "members", list(given))  # it may be a generator
        for group in ("optimizer", "schedule"):
            if getattr(self, group) is not None:
                object.__setattr__(self, group, rule_of(group, getattr(self, group)))
        if isinstance(self.max_pack_size, bool) or not isinstance(self.max_pack_size, int) or self.max_pack_size < 1:
            raise UserError(f"max_pack_size must be at least 1, got {self.max_pack_size}.")
        if self.checkpoint_every_s is not None and not self.checkpoint_every_s > 0:
            raise UserError(f"checkpoint_every_s must be above 0, or None, got {self.checkpoint_every_s}.")


def _taking(
    arguments: Callable[P, ManyArguments],
) -> Callable[[Callable[[ManyArguments], Results]], Callable[P, Results]]:
    """Give a function of one object of a dataclass the dataclass's arguments."""
    signature = inspect.signature(arguments)

    def decorate(function: Callable[[ManyArguments], Results]) -> Callable[P, Results]:
        @functools.wraps(function)
        def taking(*given: P.args, **named: P.kwargs) -> Results:
            check_keywords(named, (), [each.name for each in fields(ManyArguments)], in_fit=False)
            signature.bind(*given, **named)  # its errors name no class of ours
            return function(arguments(*given, **named))

        taking.__signature__ = signature  # type: ignore[attr-defined]  # editors read it
        return taking

    return decorate


@_taking(ManyArguments)
@ordinary_modes()
def train_many(arguments: ManyArguments) -> Results:
    """Train many models side by side, and return what became of each.

    Members whose models have one architecture and one batch size share a *pack*: their weights lie in one bank, and a
    round trains all of them at once. What each member learns is what it would learn alone. Those that do not fit wait,
    and take the row of the next one that ends. Ctrl-C ends the call and returns what there is.

        members = [Member(seed=s, subset=fold) for fold in folds(train_data, 5) for s in range(8)]
        results = train_many(make_model, train_data, test_data, members=members, max_epochs=10)
        print(results)                   # a table, with means and intervals
        results[3].model                 # a trained module
        results.out_of_fold()            # predictions of all training samples

    Args:
        model: a function without arguments that returns an `nn.Module`; members may have their own.
        train_data, test_data, validation_data: a pair of tensors or a map-style data set, as `Trainer` takes them.
            Members are measured on the validation data, or their own validation samples, while they train, and on the
            test data once, at their end.
        members: what differs between the models; or their number, which makes as many seeds.
        batch_size, max_epochs, optimizer, schedule, label_smoothing, augmentation: those of members that say nothing
            else. An epoch is a pass over the member's own samples.
        max_rounds: most rounds of a member, of one batch each; None for no such end.
        loss, metrics, mean, std, num_classes, sampling: as for `Trainer`.
        standardize_targets: as for `Trainer`, by the targets of each member's own samples. It is so for all members
            or for none: by default for none if one of them has an optimizer of its own.
        patience: a member stops after this many evaluations in a row that were not its best, and returns the weights
            of the best one. The best has the highest accuracy, or the lowest loss where there is none.
        restore_best: members return the weights of their best evaluation, not the last.
        evaluations_per_epoch: evaluations in an epoch, evenly spaced.
        seed: of the order of samples, and of the members: member n has seed + n unless it says its own.
        executor, device, precision: as for `Trainer`.
        max_pack_size: most models side by side.
        output_dir: the folder of results and models. The same call goes on with what it finds there; members of the
            same settings and data are not trained again, and one that was on its way goes on from its checkpoint.
        checkpoint_every_s: seconds between checkpoints of members on their way; None is for none.
        progress: called after every turn of training, a second at most, with the loop: its `results`, `running` and
            `members`.
        message: takes sentences for the user; None keeps them in `Results.notes` alone.

    Raises:
        UserError: members, settings, data and model do not fit each other.
    """
    with ManyRun(arguments) as run:
        return run.train()


class ManyRun:
    """A call of `train_many`; close it.

    Attributes:
        status: `interrupted` or `terminated` after a signal, else None.
    """

    status: str | None = None

    def __init__(self, arguments: ManyArguments) -> None:
        self._begun = time.perf_counter()
        self._closing = ExitStack()
        self._notes: list[str] = []
        self.arguments = arguments
        self.settings = RunSettings.of(arguments, num_learners=1)
        chosen = choose(dataclasses.replace(self.settings, num_learners="auto"), None)
        self.choices: Choices = dataclasses.replace(chosen, executor=self.settings.executor)  # `auto` stays
        train = in_tensors(arguments.train_data)
        test, validation = in_tensors(arguments.test_data), in_tensors(arguments.validation_data)
        check_data(train, "the data set")
        if as_pair(train) is None and not isinstance(train, StreamedData):
            train = loaded(train, int(_MEMORY_SHARE * read_host().memory_bytes))
            self._note(f"All {num_samples(train):,} samples of the training data were read into memory.")
        for data, what in ((test, "the test data"), (validation, "the validation data")):
            if data is not None:
                check_data(data, what)
        self.data = DataSets(
            train, test, validation, arguments.num_classes, arguments.augmentation, arguments.mean, arguments.std
        )
        self.metrics = checked_metrics(arguments.metrics, num_ranks=1)
        self._standardizes = standardizes(arguments.standardize_targets, train, arguments.loss)
        self.members = self._settled()
        self._evaluators: dict[str, Evaluator] = {}
        self._adapters: dict[str, nn.Module | None] = {}
        folder = arguments.output_dir
        self.folder = None if folder is None else given_path("output_dir", folder)
        with ExitStack() as stack:
            stack.callback(self.close)
            if self.folder is not None:
                self._closing.enter_context(locked(make_folder(self.folder) / LOCK_FILE, self._wait))
            self._build()
            stack.pop_all()

    def __enter__(self) -> ManyRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads of its data. Does not raise."""
        self._closing.close()

    def _settled(self) -> list[Settled]:
        given = self.arguments
        common = {each.name: getattr(given, each.name) for each in fields(Member) if hasattr(given, each.name)}
        own = [None]
        if isinstance(given.members, list):
            own = [getattr(each, "optimizer", None) for each in given.members]
        if given.optimizer is None:
            common["optimizer"], note = default_optimizer(given.loss, given.schedule is None)
            if None in own:
                self._note(note)
        fallback = DefaultSchedule() if given.optimizer is None else Constant()
        study = Study(
            Member(**common), self.data.train, self.settings.sample_order_seed, self.settings.sampling, fallback
        )
        found = settled(given.members, study)
        if given.standardize_targets == "auto" and any(each is not None for each in (given.optimizer, *own)):
            # With an optimizer numbers are those of a plain loop, and members are compared: all do the same.
            if self._standardizes and given.optimizer is None and None in own:
                self._note(
                    "Targets are not standardized, as some members have an optimizer of their own; "
                    "standardize_targets=True does so for all members."
                )
            self._standardizes = False
        found = [dataclasses.replace(each, settings=self._initialising(each.settings)) for each in found]
        if self._standardizes:
            found = [dataclasses.replace(each, settings=self._standardized(each.settings)) for each in found]
        if given.output_dir is None:
            return found
        shared = digest_of(
            as_pair(self.data.train), self.data.validation, self.data.test, given.loss, self.metrics, given.mean,
            given.std, given.num_classes, given.patience, given.restore_best, given.evaluations_per_epoch,
            given.max_rounds, study.order_seed, given.sampling, self.choices.precision.name,
        )  # fmt: skip
        return [dataclasses.replace(each, digest=self._digest(shared, each)) for each in found]

    def _initialising(self, settings: TrialSettings) -> TrialSettings:
        """Have a member's model initialise itself from its own samples, if it can."""
        data, places = self.data, settings.order.subset if settings.order else None
        make_model = initialising(settings.make_model, data.train, data.mean, data.std, places)
        return dataclasses.replace(settings, make_model=make_model)

    def _standardized(self, settings: TrialSettings) -> TrialSettings:
        """Have a member's model compute in standard deviations of the targets of its own samples."""
        own = (None, None) if settings.order is None else (settings.order.subset, settings.order.weights)
        statistics = target_statistics(self.data.train, self.arguments.loss, *own)
        asked = self.arguments.standardize_targets is True
        make_model = standardizing(settings.make_model, *statistics, asked)
        return dataclasses.replace(settings, make_model=make_model, model_key=f"{settings.model_key}, standardized")

    def _digest(self, shared: str, member: Settled) -> str:
        own = {key: value for key, value in vars(member.settings).items() if key not in ("make_model", "model_key")}
        return digest_of(shared, own, member.max_epochs, member.validation, member.settings.new_model())

    def _wait(self) -> None:
        self._note(f"Another process trains in {self.folder}; this one waits for it.")

    def _build(self) -> None:
        settings, data, first = self.settings, self.data, self.members[0]
        if settings.executor == "auto":
            check_trusted(try_once(self.choices.device, self._note), self.choices.precision)
        template = seeded_model(first.settings.make_model, first.settings.seed, None)
        self._note_equal_starts(template)
        self._note_twins()
        loss, self.data = settled_loss_of(self.arguments.loss, template, data, settings, self.choices.device)
        for note in remarks_on_targets(self.data.train, loss, template):
            by_own = self._standardizes and any(each.settings.order is not None for each in self.members)
            self._note(f"{note} Each member has the mean and deviation of its own samples." if by_own else note)
        smoothed = next((each.name for each in self.members if each.settings.label_smoothing), None)
        if smoothed is not None and plain_loss(loss) is not nn.functional.cross_entropy:
            raise UserError(f"member {smoothed}: label_smoothing is for cross-entropy, got another loss; leave it out.")
        every = [each.settings.augmentation for each in self.members]
        strongest = Augmentation(
            crop_padding=max(each.crop_padding for each in every),
            flip=any(each.flip for each in every),
            random_erasing=max(each.random_erasing for each in every),
        )
        train = self._feed(self.data.train, strongest, "training")
        if train.rounded is not None and settings.precision == "auto" and self.choices.precision != FP32:
            reason, _, _ = train.rounded.remark(self.choices.precision.compute).partition("; ")
            self._note(f"precision is fp32, because {reason}.")
            self.choices = dataclasses.replace(self.choices, precision=FP32)
            train = self._feed(self.data.train, strongest, "training")
        if not isinstance(train, ResidentFeed):
            raise UserError(
                "members learn from data in the device's memory, got training data that are streamed to it; give data "
                "that it holds, or fewer samples."
            )
        for note in train.take_notes():
            self._note(note)
        self.train_feed = train
        self.validation = self._optional(self.data.validation, "validation")
        self.test = self._optional(self.data.test, "test")
        self._own: dict[bytes, Feed] = {}
        feeds = TrialData(
            feed_of=train.without_augmentation().with_batch_size,
            num_samples=train.num_samples,
            validation=self.validation or self.test or train.only(_first(train)),
            test=self.test,
            num_classes=count_classes(self.data, loss),
            loss=StandardizedLoss(loss) if self._standardizes or is_standardized(template) else loss,
        )
        most = min(self.arguments.max_pack_size, len(self.members))
        total = sum(round(each.max_epochs * each.num_samples(train.num_samples)) for each in self.members)

        def announce(sentence: str) -> None:
            self._note(sentence.replace("Trials of", "Members of").replace("many trials of", "many members of"))

        self.registry = TrialRegistry(
            self._trial, feeds, settings, self.choices, most, announce, total, metrics=self.metrics, pads=True
        )

    def _note_equal_starts(self, template: nn.Module) -> None:
        first = self.members[0].settings
        others = [each.settings for each in self.members if each.settings.model_key == first.model_key]
        other = next((each for each in others if each.seed != first.seed), None)
        if other is None:
            return
        for note in remarks_on_starts(template, seeded_model(other.make_model, other.seed, None)):
            self._note(note)

    def _note_twins(self) -> None:
        """Tell of members that train the same as others, whose interval would be 0."""
        seeds = Counter(each.settings.seed for each in self.members)
        same = Counter(
            digest_of({**vars(each.settings), "make_model": None}, each.max_epochs)
            for each in self.members if seeds[each.settings.seed] > 1
        )  # fmt: skip
        if twins := sum(count - 1 for count in same.values()):
            self._note(
                f"Of {len(self.members)} members {twins} repeat the seed, samples and settings of another, and count "
                "in means and intervals all the same; give each a seed of its own."
            )

    def _trial(self, number: int, _: Mapping[str, Any]) -> TrialSettings:
        return self.members[number].settings

    def _feed(self, data: Data, augmentation: Augmentation | None, what: str) -> Feed:
        new = new_feed(data, 1, augmentation, self.data, self.settings, self.choices, training=what == "training")
        if self.data.num_classes is not None:
            new.check_labels(Classes(self.data.num_classes, IGNORED), what)
        return self._closing.enter_context(closing(new))

    def _optional(self, data: Data | None, what: str) -> Feed | None:
        return None if data is None else self._feed(data, None, what)

    def validation_of(self, member: Settled) -> Feed | None:
        """Return the feed that a member is measured on while it trains."""
        if member.validation is None:
            return self.validation
        key = member.validation.tobytes()
        if key not in self._own:
            self._own[key] = self.train_feed.only(member.validation)
        return self._own[key]

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)
            if self.arguments.message is not None:
                self.arguments.message(sentence)

    def train(self) -> Results:
        """Train all members, and return their results."""
        store = Store(self.folder, self._base_of)
        loop = ManyLoop(
            self.members, self.registry, self._plan(), self.validation_of, self.test, store,
            Hooks(self._note, self.arguments.progress or (lambda _: None)),
        )  # fmt: skip
        with StopSignal(enabled=True) as signals:
            loop.run(lambda: signals.status is not None)
            self.status = signals.status
        if self.status is not None:
            ended = sum(each.has_ended for each in loop.results.values())
            on = "; the same call goes on" if self.folder is not None else ""
            self._note(f"{self.status.capitalize()}: {ended} of {len(self.members)} members have ended{on}.")
        found = [self._with_module(*each) for each in zip(self.members, self._of(loop), strict=True)]
        self._save_adapters(found)
        return Results(
            found, self.train_feed.num_samples, loop.samples / loop.train_s if loop.train_s else 0.0,
            time.perf_counter() - self._begun, self._notes, self.folder, partial(self._held_out, found), self._together,
            self._selected,
        )  # fmt: skip

    def _of(self, loop: ManyLoop) -> list[MemberResult]:
        waits = {each.number: MemberResult(each.name, each.settings.seed, "not finished") for each in self.members}
        return [loop.results.get(each.number, waits[each.number]) for each in self.members]

    def _plan(self) -> Plan:
        given = self.arguments
        feed = next((own for own in map(self.validation_of, self.members) if own is not None), None)
        if self.validation is not None and all(member.validation is not None for member in self.members):
            self._note("validation_data measures no member: all have validation samples of their own.")
        returns_best = given.restore_best or given.patience is not None
        if returns_best and feed is None:
            raise UserError(
                "patience and restore_best go by evaluations, got neither validation_data nor members with validation "
                "samples; give one of them."
            )
        has_accuracy = feed is not None and self._evaluator(self.members[0]).counts_correct(feed)
        return Plan(
            given.evaluations_per_epoch, given.patience, returns_best, "accuracy" if has_accuracy else "loss",
            has_accuracy, given.checkpoint_every_s, given.max_rounds,
        )  # fmt: skip

    def _evaluator(self, member: Settled) -> Evaluator:
        key = member.settings.model_key
        if key not in self._evaluators:
            template = seeded_model(member.settings.make_model, member.settings.seed, None).to(self.choices.device)
            self._evaluators[key] = self.registry.evaluator(template)
        return self._evaluators[key]

    def _adapter_of(self, member: Settled) -> nn.Module | None:
        """Return a model of a member's kind, on the host, if it has an adapter."""
        key = member.settings.model_key
        if key not in self._adapters:
            model = member.settings.new_model()
            self._adapters[key] = model if is_adapter(model) else None
            self.registry.hold_once(model)
        return self._adapters[key]

    def _base_of(self, member: Settled) -> Mapping[str, Tensor]:
        """Return the frozen values that a member with an adapter begins with, on the host; else nothing."""
        if self._adapter_of(member) is None:
            return {}
        model = member.settings.new_model()  # its seed may draw another base
        self.registry.hold_once(model)
        return {name: own.detach() for name, own in frozen_parameters(model).items()}

    def _save_adapters(self, results: Sequence[MemberResult]) -> None:
        """Write the adapter of each member that has one and has ended to a folder of its name. Raises UserError."""
        if self.folder is None:
            return
        folder, taken = self.folder / ADAPTERS_FOLDER, set[str]()
        for member, result in zip(self.members, results, strict=True):
            if not result.has_ended or self._adapter_of(member) is None:
                continue
            name = re.sub(r"[^\w.+=,-]+", "-", member.name).strip(".-")[:_LONGEST_NAME]
            while name in taken or not name:
                name = f"{name}-{member.number}"
            taken.add(name)
            try:
                folder.mkdir(exist_ok=True)
                save_adapter(self._evaluator(member).module(result.state, reads=True), folder / name)
            except OSError as error:
                raise UserError(f"cannot write {folder / name} ({error}); make room there, and call again.") from error
        if taken:
            self._note(f"Adapters, as PEFT loads them, are in {folder}.")

    def _with_module(self, member: Settled, result: MemberResult) -> MemberResult:
        if not result.state:
            return result
        return dataclasses.replace(result, _module=lambda: self._evaluator(member).module(result.state).cpu())

    def _together(self, results: Sequence[MemberResult], weights: Sequence[int]) -> dict[str, float] | None:
        """Return loss, accuracy and metrics of the mean prediction on the test data, in which members have weights."""
        found = [own for own in zip(self.members, results, weights, strict=True) if own[1].has_ended and own[2]]
        if self.test is None or not found:
            return None
        predictions = (self._evaluator(member).predict(own.state, self.test) * weight for member, own, weight in found)
        mean = functools.reduce(torch.add, predictions) / sum(weight for *_, weight in found)
        (its,) = self._measured(mean[None], self.test)
        return {**({} if its.accuracy is None else {"accuracy": its.accuracy}), "loss": its.loss, **its.metrics}

    def _measured(self, means: Tensor, feed: Feed) -> Sequence[Evaluation]:
        """Return the evaluations of mean predictions [M, N, ...]."""
        evaluator = self._evaluator(self.members[0])
        targets = torch.cat([batch.targets for batch in feed.evaluation_batches(evaluator.batch_size)])
        if takes_classes(evaluator.loss) and means.ndim > 2:  # scores of which the softmax is this mean
            means = means.clamp(min=torch.finfo(means.dtype).tiny).log()
        tally = Tally(evaluator, len(means), means.device)
        tally.add(means, targets)
        return tally.evaluations()

    def _selected(self, results: Sequence[MemberResult], most: int) -> list[int]:
        """Return the numbers of the members that `greedy_selection` finds. Raises UserError."""
        found = [own for own in zip(self.members, results, strict=True) if own[1].has_ended]
        feeds = {id(feed): feed for feed in (self.validation_of(member) for member, _ in found)}
        feed = next(iter(feeds.values()), None)
        if len(feeds) != 1 or feed is None:
            raise UserError(
                "members are selected by validation samples that all of them share; give validation_data, or each "
                "Member the same subset=Fold(train, validation)."
            )
        predictions = torch.stack([self._evaluator(member).predict(own.state, feed) for member, own in found])
        chosen = greedy_selection(predictions, lambda means: [own.loss for own in self._measured(means, feed)], most)
        return [found[each][0].number for each in chosen]

    def _held_out(self, found: Sequence[MemberResult]) -> Iterator[tuple[int, Ids, Evaluator, Feed]]:
        for member, result in zip(self.members, found, strict=True):
            feed = self.validation_of(member)
            if member.validation is not None and result.has_ended and feed is not None:
                yield member.number, member.validation, self._evaluator(member), feed


def _first(feed: ResidentFeed) -> Ids:
    return np.arange(min(feed.num_samples, 256), dtype=np.int64)
