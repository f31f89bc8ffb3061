"""Build one worker of a search from the command line's configuration, and run it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, Literal

from torch import nn

from crossbow_py.cli.config_files import write_yaml
from crossbow_py.core.errors import UserError
from crossbow_py.core.host import versions
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.plain_values import without
from crossbow_py.core.settings import to_mapping
from crossbow_py.core.targets import import_target, shown_target
from crossbow_py.core.trees import call
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Classes
from crossbow_py.data.feed import Feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.data.sources import DataSource
from crossbow_py.engine.modules.dropout import counter_seed, differ_in_rate_alone, dropout_rates, has_one_rate
from crossbow_py.engine.modules.losses import IGNORED, Loss
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.modules.standardized import StandardizedLoss, remark_of, standardizing
from crossbow_py.models.custom import CustomModel
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.trial_registry import TrialData, TrialRegistry
from crossbow_py.search.config import SearchConfig, trial_config
from crossbow_py.search.events import (
    SEARCH_FILE,
    BestTrial,
    RunningTrial,
    SearchInfo,
    SearchListener,
    SearchProgress,
    SearchSummary,
    TrialRecord,
)
from crossbow_py.search.folder import JOURNAL_FILE, TRIALS_FOLDER, SearchFolder
from crossbow_py.search.hyperband import Results, best, is_over, is_reached, total_samples
from crossbow_py.search.identity import defaults_of, identity
from crossbow_py.search.loop import SearchHooks, SearchLoop, SearchRules, epoch_samples
from crossbow_py.search.outcome import Leader, LeaderRun, find_leader, kept_best, trial_records
from crossbow_py.search.report.search_file import recorded_summary
from crossbow_py.search.study.states import TrialStates
from crossbow_py.search.study.storage import BadStorageError, StorageError, shown_address
from crossbow_py.search.study.study import SharedStudy
from crossbow_py.telemetry.records import BEST_FOLDER, read_json
from crossbow_py.train.build import count_classes, new_feed
from crossbow_py.train.checkpoints.weights import MODEL_FILE
from crossbow_py.train.checks.losses import loss_on, remarks_on_targets, target_statistics
from crossbow_py.train.checks.seeded_model import initialising
from crossbow_py.train.config import TrainConfig, config_to_mapping, first_model
from crossbow_py.train.evaluation.metrics import Metric, checked_metrics, metrics_of
from crossbow_py.train.ladder.ladder import check_trusted, try_once
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_folder.recorded_config import train_command
from crossbow_py.train.run_settings import RunSettings, choose

# Keys of a model that trials of one pack need not have in common.
_OF_A_ROW = frozenset({"dropout", "lora.dropout", "lora.alpha"})


class SearchRun:
    """A search as one worker process runs it; close it.

    Args:
        config: the configuration.
        folder: the folder that the search is recorded in.
        listeners: receive what happens; whoever made them closes them.
        loss: what all trials minimise.

    Raises UserError, or StorageError when the storage cannot be used.
    """

    def __init__(
        self, config: SearchConfig, folder: SearchFolder, listeners: Sequence[SearchListener] = (),
        loss: Loss = nn.functional.cross_entropy, standardize_targets: bool | Literal["auto"] = False,
    ) -> None:  # fmt: skip
        self._begun = time.perf_counter()
        self._closing = ExitStack()
        self._messages: dict[str, None] = {}  # in their order
        self._is_news = False
        self._notes: list[str] = []
        self.config, self.folder, self.listeners, self._loss = config, folder, listeners, loss
        self._standardizes = standardize_targets
        with ExitStack() as stack:
            stack.callback(self.close)
            self._build()
            stack.pop_all()

    def _build(self) -> None:
        config, folder = self.config, self.folder
        self.settings = RunSettings.of(config, num_learners=1)
        chosen = choose(dataclasses.replace(self.settings, num_learners="auto"), None)
        self.choices = dataclasses.replace(chosen, executor=self.settings.executor)  # `auto` stays: packs choose
        if self.settings.executor == "auto":
            check_trusted(try_once(chosen.device, self._say), chosen.precision)
        brackets = config.brackets()
        num_trials = sum(bracket.num_trials for bracket in brackets)
        most = 1 if config.packing == "none" else min(config.max_pack_size, num_trials)
        metrics = checked_metrics(metrics_of(config.metrics), num_ranks=1)
        self.rules = SearchRules(
            brackets, config.metric, config.packing, config.seed, lookahead=most,
            checkpoint_every_s=config.checkpoint_every_s, maximize=maximizes(config, metrics),
        )  # fmt: skip
        self._firsts: dict[str, nn.Module | None] = {}  # by model, argument and other arguments
        self.source: DataSource = config.data.load(progress=sys.stderr.isatty())
        space = config.parsed_space
        data = self._search_data()
        self.registry = TrialRegistry(
            self.trial_settings, data, self.settings, self.choices, most, self._say,
            total_samples(brackets, data.num_samples), metrics=metrics,
        )  # fmt: skip
        self._check_corners()
        self._loading_s = time.perf_counter() - self._begun
        # Last, so that a mistake that is found out before leaves nothing in a storage.
        self._address = config.storage or f"journal:{folder.path / JOURNAL_FILE}"
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self.study = SharedStudy(
            self._address, config.study or config.experiment, sampler=config.sampler, space=space, seed=config.seed,
            maximize=self.rules.maximize, worker=self._worker, lease_s=config.lease_s,
        )  # fmt: skip
        self._closing.enter_context(closing(self.study))
        own = identity(config)
        has_results = any((folder.path / name).exists() for name in (SEARCH_FILE, TRIALS_FOLDER))
        if has_results and not self.study.exists():
            raise UserError(
                f"{folder.path} holds results, and {shown_address(self._address)} holds no search; restore it."
            )
        self.study.open({**own, "precision": self.choices.precision.name}, defaults_of(own))
        known = {trial: len(bracket.epochs) for bracket in brackets for trial in bracket.trials}
        for each in self.study.results():
            if each.rung >= known.get(each.trial, 0):
                found = f"trial {each.trial} has a result at rung {each.rung}, and there is no such rung"
                raise BadStorageError(shown_address(self._address), found)
        self.states = TrialStates(folder.path / TRIALS_FOLDER)

    def close(self) -> None:
        """End the threads of its data and of its study. Does not raise."""
        self._closing.close()

    # --- trials -------------------------------------------------------------------------------------------------------

    def _trial_config(self, trial: int, params: Mapping[str, Any]) -> TrainConfig:
        given = params.get("seed")
        seed = int(given) if given is not None else counter_seed(self.config.seed, "trial", 0, trial) >> 32
        return trial_config(self.config, params, seed)

    def trial_settings(self, trial: int, params: Mapping[str, Any]) -> TrialSettings:
        """Return what a trial trains. Raises UserError when its parameters do not fit each other."""
        found = self._settings(trial, params)
        if self.registry.data.streams:
            return found
        wider = self.config.parsed_space.wider(params, "model.")
        return dataclasses.replace(found, wider=tuple(self._settings(trial, each) for each in wider))

    def _settings(self, trial: int, params: Mapping[str, Any]) -> TrialSettings:
        own, source = self._trial_config(trial, params), self.source
        made = partial(first_model, own.model, source.input_shape, source.num_classes, own.init_from)
        make_model = initialising(made, source.train, source.mean, source.std)
        of_a_row = _OF_A_ROW | self._rates_of(own, made)
        model = without(to_mapping(own.model), of_a_row)
        return TrialSettings(
            seed=own.seed,
            make_model=make_model
            if self._targets is None
            else standardizing(make_model, *self._targets, asked=self._standardizes is True),
            model_key=json.dumps([own.model.NAME, model], sort_keys=True, default=str),
            batch_size=own.batch_size,
            optimizer=own.optimizer,
            schedule=own.schedule,
            label_smoothing=own.label_smoothing,
            augmentation=own.data.augmentation,
            name=_name(own.model, params, of_a_row),
            features=self.config.parsed_space.features(params),
        )

    def _rates_of(self, own: TrainConfig, make_model: Callable[[], nn.Module]) -> set[str]:
        """Return the searched keys of a user's own model that set the rate of its dropout and change nothing else."""
        searched = {parameter.key for parameter in self.config.parsed_space.parameters}
        given = own.model.args.items() if isinstance(own.model, CustomModel) else ()
        return {
            f"args.{name}" for name, rate in given
            if f"model.args.{name}" in searched and isinstance(rate, float) and 0 < rate < 1
            and self._is_rate(name, rate, own, make_model)
        }  # fmt: skip

    def _is_rate(self, name: str, rate: float, own: TrainConfig, make_model: Callable[[], nn.Module]) -> bool:
        """Compare a model with the first one that differs from it in the argument `name` alone."""
        others = {**own.model.args, name: None}
        key = json.dumps([own.model.target, others], sort_keys=True, default=str)
        try:
            with kept_generators():
                module = make_model()
                if key not in self._firsts:
                    with closing(self.registry.data.feed_of(own.batch_size)) as feed:
                        inputs = feed.first_samples(2).inputs
                    alone = has_one_rate(copy.deepcopy(module), lambda it: call(it, inputs))
                    self._firsts[key] = module if alone else None
            first = self._firsts[key]
            is_its = set(dropout_rates(module)) == {rate}
            return first is not None and is_its and differ_in_rate_alone(first, module)
        except Exception:  # of the user's model: a trial's, which records it
            return False

    def _check_corners(self) -> None:
        """Raise UserError for what would make trials fail one after another, and if none at a corner can train."""
        for own in self._corners():
            self.registry.data.feed_of(own.batch_size).close()
            if isinstance(own.model, CustomModel):
                import_target("model.target", own.model.target)
        mistakes: list[UserError] = []
        for params in self.config.parsed_space.corners():
            try:
                self.registry.check(params)
                return
            except UserError as error:
                mistakes.append(error)
            except Exception:  # of the user's model: a trial's, which records it
                return
        if mistakes:
            raise mistakes[0]

    def _corners(self) -> list[TrainConfig]:
        return [trial_config(self.config, params, seed=0) for params in self.config.parsed_space.corners()]

    # --- data ---------------------------------------------------------------------------------------------------------

    def _search_data(self) -> TrialData:
        source, config = self.source, self.config
        if source.validation is None:
            raise UserError("a search compares trials on validation data, got none; set data.validation_fraction=0.1.")
        data = DataSets(
            source.train, source.test, source.validation, source.num_classes, mean=source.mean, std=source.std
        )

        def feed(dataset: Any, size: int, augmentation: Augmentation | None, what: str = "training") -> Feed:
            new = new_feed(dataset, size, augmentation, data, self.settings, self.choices, training=what == "training")
            if source.num_classes is not None:
                new.check_labels(Classes(source.num_classes, IGNORED), what)
            return new

        def kept(dataset: Any, augmentation: Augmentation | None, what: str) -> Feed:
            return self._closing.enter_context(closing(feed(dataset, 1, augmentation, what)))

        train = kept(source.train, self._most_augmentation(), "training")
        if train.rounded is not None and self.settings.precision == "auto" and self.choices.precision != FP32:
            reason, _, _ = train.rounded.remark(self.choices.precision.compute).partition("; ")
            self._notes = [f"precision is fp32, because {reason}."]
            self.choices = dataclasses.replace(self.choices, precision=FP32)
            train = kept(source.train, self._most_augmentation(), "training")
        self._targets = target_statistics(source.train, self._loss) if self._standardizes else None
        said = remarks_on_targets(source.train, self._loss) if self._targets is None else [remark_of(*self._targets)]
        self._notes += [*train.take_notes(), *said]
        loss = loss_on(self.choices.device, self._loss)
        feed_of: Callable[[int], Feed]
        if isinstance(train, ResidentFeed):
            feed_of = train.without_augmentation().with_batch_size
        else:  # samples of a stream are augmented once, for all trials
            keys = [each.key for each in config.parsed_space.parameters if each.key.startswith("data.")]
            if keys:
                raise UserError(
                    f"space: {keys[0]} is not for streamed data={config.data.NAME}, as trials share it; leave it out."
                )
            feed_of = partial(feed, source.train, augmentation=source.augmentation)
        return TrialData(
            feed_of=feed_of,
            num_samples=train.num_samples,
            validation=kept(source.validation, None, "validation"),
            test=None if source.test is None else kept(source.test, None, "test"),
            num_classes=count_classes(data, self._loss),
            streams=train.STREAMS,
            loss=StandardizedLoss(loss) if self._standardizes else loss,
        )

    def _most_augmentation(self) -> Augmentation:
        """Return the strongest augmentation of any trial, which images are stored for."""
        corners = [own.data.augmentation for own in self._corners()]
        return Augmentation(
            crop_padding=max(each.crop_padding for each in corners),
            flip=any(each.flip for each in corners),
            random_erasing=max(each.random_erasing for each in corners),
        )

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self, stopped: Callable[[], str | None]) -> SearchSummary:
        """Search until nothing is left, the time is over, the target is reached or `stopped` gives a status."""
        info, records = self._info(), trial_records(self.rules, self.study)
        before = self._ended_before(info, records)
        for listener in self.listeners:
            listener.on_start(info)
        if before is not None:
            self._say("Nothing is left to search; this is how it ended.")
            for listener in self.listeners:
                listener.on_end(before)
            return before
        for listener in self.listeners:
            listener.on_trials(records)
        for note in (*self.source.notes, *self._notes):
            self._say(note)
        hooks = SearchHooks(message=self._say, progress=self._progress, finished=self._finished)
        search = SearchLoop(self.rules, self.study, self.registry, self.states, hooks)
        self._search = search
        try:
            done = search.run(lambda: stopped() is not None or self._is_enough())
        except StorageError:  # nobody can be asked who still searches
            raise
        except BaseException:
            with suppress(Exception):  # the error before it counts
                self._leave()
            raise
        self._leave()
        status = "finished" if done else stopped() or "stopped"
        return self._end(info, status, search)

    def _leave(self) -> None:
        num_others = self.study.num_searchers() - 1
        for listener in self.listeners:
            listener.on_leave(num_others)

    def _is_enough(self) -> bool:
        config, spent = self.config, time.perf_counter() - self._begun
        if config.max_time_s is not None and spent >= config.max_time_s:
            return True
        return self._is_target_reached(self._search.results)

    def _is_target_reached(self, results: Results) -> bool:
        target = self.config.target_accuracy
        return target is not None and is_reached(self.rules.brackets, results, target)

    def _ended_before(self, info: SearchInfo, records: tuple[TrialRecord, ...]) -> SearchSummary | None:
        """Return how the search ended here before, if nothing is left to search and search.json says so."""
        results = self.study.results()
        if is_over(self.rules.brackets, results, maximize=self.rules.maximize):
            status = "finished"
        elif self._is_target_reached(results):
            status = "stopped"
        else:
            return None
        found = recorded_summary(read_json(self.folder.path / SEARCH_FILE), info, records)
        if found is None or found.status != status:
            return None
        leader = find_leader(self.rules, self.study)
        if leader is None or found.best is None:
            return found if leader is None and found.best is None else None
        best = self._confirmed(found.best, leader)
        return None if best is None else dataclasses.replace(found, best=best)

    def _confirmed(self, recorded: BestTrial, leader: Leader) -> BestTrial | None:
        """Return the best trial by the study, with the test results of search.json, which anybody may have written.

        None if they are of another trial, or no numbers.
        """
        if (leader.trial, leader.value) != (recorded.trial, recorded.value):
            return None
        if not all(isinstance(each, float | None) for each in (recorded.test_accuracy, recorded.test_loss)):
            return None
        own, model = self._run_of(leader), self.folder.path / BEST_FOLDER / MODEL_FILE
        return dataclasses.replace(
            recorded, epochs=leader.epochs, params=leader.params, seed=own.settings.seed, command=own.command,
            model_path=str(model) if model.exists() else None,
        )  # fmt: skip

    def _end(self, info: SearchInfo, status: str, search: SearchLoop) -> SearchSummary:
        spent = search.spent
        found, test_s = None, 0.0
        if status in ("finished", "stopped"):
            find = partial(find_leader, self.rules, self.study)
            found, test_s = kept_best(find, self._run_of, self.registry, self.states, self.folder.path / BEST_FOLDER)
        spent.evaluation_s += test_s
        wall_s = time.perf_counter() - self._begun
        known_s = self._loading_s + spent.train_s + spent.evaluation_s + spent.tuning_s + spent.waiting_s
        summary = SearchSummary(
            info=info,
            status=status,
            trials=trial_records(self.rules, self.study),
            best=found,
            samples=spent.samples,
            loading_time_s=self._loading_s,
            train_time_s=spent.train_s,
            evaluation_time_s=spent.evaluation_s,
            tuning_time_s=spent.tuning_s,
            waiting_time_s=spent.waiting_s,
            overhead_time_s=wall_s - known_s,
            wall_time_s=wall_s,
            images_per_s=spent.samples / spent.train_s if spent.train_s else 0.0,
            notes=tuple(self._messages),
            versions=versions(),
        )
        for listener in self.listeners:
            listener.on_end(summary)
        return summary

    def _run_of(self, leader: Leader) -> LeaderRun:
        own = self._trial_config(leader.trial, leader.params)
        if not leader.is_at_end:  # a stop that leaves the length its schedule was planned for
            samples = epoch_samples(leader.epochs, self.registry.data.num_samples)
            own = dataclasses.replace(own, max_rounds=-(-samples // own.batch_size))
        settings = self.trial_settings(leader.trial, leader.params)
        return LeaderRun(settings, train_command(own), write_yaml(config_to_mapping(own)))

    # --- telling ------------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        if message in self._messages:
            return
        self._messages[message] = None
        for listener in self.listeners:
            listener.on_message(message)

    def _finished(self, search: SearchLoop, _: object) -> None:
        self._is_news = True

    def _progress(self, search: SearchLoop) -> None:
        if self._is_news:  # once for all segments that ended together
            self._is_news, records = False, trial_records(self.rules, self.study)
            for listener in self.listeners:
                listener.on_trials(records)
        results = search.results
        leader = best(self.rules.brackets, results, maximize=self.rules.maximize)
        values = [value for segment, value in results.items() if segment.trial == leader and value is not None]
        progress = SearchProgress(
            running=tuple(
                RunningTrial(slot.segment.trial, slot.segment.rung, slot.progress, search.packs.number_of(slot))
                for slot in search.slots
            ),
            num_finished=len(results),
            num_segments=sum(sum(bracket.sizes) for bracket in self.rules.brackets),
            images_per_s=search.spent.samples / search.spent.train_s if search.spent.train_s else 0.0,
            elapsed_s=time.perf_counter() - self._begun,
            best_trial=leader,
            best_value=values[-1] if values else None,
        )
        for listener in self.listeners:
            listener.on_progress(progress)

    def _info(self) -> SearchInfo:
        config, rules = self.config, self.rules
        return SearchInfo(
            experiment=config.experiment,
            data=self.source.name,
            num_trials=sum(bracket.num_trials for bracket in rules.brackets),
            num_brackets=len(rules.brackets),
            method=config.method,
            sampler=config.sampler,
            metric=f"validation_{config.metric}",
            maximize=rules.maximize,
            max_epochs=config.max_epochs,
            device=str(self.choices.device),
            precision=self.choices.precision.name,
            policy=config.packing,
            seed=config.seed,
            storage=shown_address(self._address),
            worker=self._worker,
            num_train_samples=self.registry.data.num_samples,
            brackets=rules.brackets,
            space=config.parsed_space,
            num_finished_segments=len(self.study.results()),
            output_dir=str(self.folder.path),
        )


def maximizes(config: SearchConfig, metrics: Mapping[str, Metric]) -> bool:
    """Return whether greater values are better. Raises UserError if neither the user nor the metric says so."""
    if config.metric in ("accuracy", "loss"):
        return config.metric == "accuracy"
    own = metrics.get(config.metric) or metrics.get(config.metric.partition("/")[0])
    greater = getattr(own, "higher_is_better", None) if config.maximize is None else config.maximize
    if not isinstance(greater, bool):
        raise UserError(f"metric={config.metric} does not say whether greater is better; set maximize=true or false.")
    return greater


def _name(model: Any, params: Mapping[str, Any], of_a_row: Collection[str]) -> str:
    """Return what a trial's model is called in messages, with the parameters that are searched of it."""
    name = shown_target(model.target) if isinstance(model, CustomModel) else model.NAME
    own = {key.removeprefix("model."): value for key, value in params.items() if key.startswith("model.")}
    given = ", ".join(f"{key.removeprefix('args.')}={value}" for key, value in own.items() if key not in of_a_row)
    return f"{name}({given})" if given else name
