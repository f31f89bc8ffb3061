"""Reports to listeners and callers: run facts, progress, epoch records, example predictions, summary, result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.files import own_file
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.core.host import versions
from crossbow_py.core.settings import apart_from_defaults, flat, to_mapping, written
from crossbow_py.data.normalisation import IDENTITY, Normalisation
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.events import (
    EpochRecord,
    LearnerCount,
    LearningStatistics,
    Listener,
    Predictions,
    Progress,
    RunInfo,
    Summary,
)
from crossbow_py.telemetry.learners import LearnerFigures, with_best
from crossbow_py.telemetry.rank_pace import spread_of
from crossbow_py.telemetry.records import SUMMARY_FILE, write_json
from crossbow_py.telemetry.throughput import Lap, ThroughputMeter
from crossbow_py.telemetry.timeline import TRACE_FILE
from crossbow_py.train.checkpoints.weights import SavedModels
from crossbow_py.train.evaluation.evaluator import Evaluation, Examples, Measured
from crossbow_py.train.loop.average_model import spread
from crossbow_py.train.loop.rank_telemetry import RankTelemetry
from crossbow_py.train.run import DataSets, Run
from crossbow_py.train.train_state import TrainState

_CHANNELS = (1, 3)  # grey or RGB

_PROGRESS_EVERY_S = 0.2
_SHOWN_GROWTH = 1.5  # predictions are shown again after 1.5 times the samples
_SCALED = {"sqrt": "rate × √K", "linear": "rate × K", "adascale": "rate × gain"}


@dataclass(frozen=True)
class Result:
    """The result of `fit`.

    Attributes:
        status: `finished`, `target_reached`, or with `handle_signals` `interrupted` or `terminated`.
        stop_reason: the argument of `fit` that ended the run, such as `max_epochs`, or the signal.
        test_accuracy: accuracy of the final model, between 0 and 1; None without test data or classes, or after a
            signal.
        images_per_s: samples per second of training time.
        model: the average model or its EMA, in float32; the first learner's if learners are independent. With
            `patience` or `restore_best` it is that of the best evaluation.
        models: each learner's model if learners are independent, of which `summary.learners` says the best; otherwise
            empty.
        summary: the summary of the run, as written to summary.json.
        history: a flat dict for each evaluation of this call, as `pandas.DataFrame` takes a list of them.
    """

    status: str
    stop_reason: str
    test_accuracy: float | None
    images_per_s: float
    model: nn.Module
    models: list[nn.Module]
    summary: Summary
    history: list[dict[str, Any]]

    @property
    def test_loss(self) -> float | None:
        """The loss of the final model; None without test data, or after a signal."""
        return self.summary.test_loss

    def __repr__(self) -> str:
        tested = {"test_accuracy": self.test_accuracy, "test_loss": self.test_loss, **self.summary.metrics}
        num_parameters = sum(each.numel() for each in self.model.parameters())
        lines = [
            f"Result: {self.status} ({self.stop_reason})",
            "  " + ", ".join(f"{name} {value:.4g}" for name, value in tested.items() if value is not None),
            f"  {self.images_per_s:,.0f} images/s, {len(self.history)} evaluations",
            f"  model: {type(self.model).__name__}, {num_parameters:,} parameters",
        ]
        for place, each in enumerate(self.summary.learners or ()):
            if each.is_best:
                own = "".join(f", {name} {value:.4g}" for name, value in each.settings.items())
                lines.append(f"  best of {len(self.models)} learners: models[{place}]{own}")
        return "\n".join(line for line in lines if line.strip())


class Reporter:
    """Passes events on to listeners. Called from the training loop's thread.

    A listener whose file cannot be written any more is dropped with one message: a full disk stops the records, not
    the run.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        meter: ThroughputMeter,
        clock: Callable[[], float] = time.monotonic,
        telemetry: RankTelemetry | None = None,
    ) -> None:
        self.meter, self._clock, self._telemetry = meter, clock, telemetry
        self.started = False
        self._records: list[EpochRecord] = []
        self._listeners, self._dropped = list(listeners), list[Listener]()
        self._next_progress_s = -math.inf
        self._started_s, self._wall_before_s = clock(), 0.0
        self._closed = self._lacks_checkpoint = False
        self._unshown: tuple[Evaluation, str, DataSets, int] | None = None  # the newest evaluation, until shown
        self._shown: Evaluation | None = None
        self._next_shown_samples = 0.0

    def _tell(self, call: Callable[[Listener], None]) -> None:
        failed: list[tuple[Listener, OSError]] = []
        for listener in self._listeners:
            try:
                with torch.enable_grad():  # restores the mode if the listener changes it
                    call(listener)
            except OSError as error:
                failed.append((listener, error))
        for listener, _ in failed:
            self._listeners.remove(listener)
            self._dropped.append(listener)
        for listener, reason in failed:
            self.message(f"{type(listener).__name__} stops recording ({reason}); training goes on.")
        for note in [note for listener in self._listeners for note in listener.take_notes()]:
            self.message(note)

    @property
    def wall_s(self) -> float:
        """The seconds since the run began, including those of earlier processes."""
        return self._wall_before_s + self._clock() - self._started_s

    def start(self, info: RunInfo, wall_before_s: float = 0.0) -> None:
        """Announce the run; earlier processes took `wall_before_s` of its time."""
        self.info, self._wall_before_s = info, wall_before_s
        self._tell(lambda listener: listener.on_start(info))
        self.started = True

    def message(self, text: str) -> None:
        """Send a message to the user."""
        self._tell(lambda listener: listener.on_message(text))

    def checkpoint(self, path: str, samples_seen: int) -> None:
        """Announce a checkpoint on disk."""
        self._lacks_checkpoint = False
        self._tell(lambda listener: listener.on_checkpoint(path, samples_seen))

    def no_checkpoint(self, reason: str) -> None:
        """Announce that a checkpoint could not be written, once until there is one again."""
        if not self._lacks_checkpoint:
            self.message(f"No checkpoint was written ({reason}); training goes on, make room soon.")
        self._lacks_checkpoint = True

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of epochs, as flat dicts of numbers."""
        return [
            {key: value for key, value in asdict(own).items() if isinstance(value, int | float)} | own.metrics
            for own in self._records
        ]

    def epoch(self, record: EpochRecord) -> None:
        """Pass on the record of an epoch, with the pace of ranks."""
        if self._telemetry is not None:
            record = replace(record, ranks=spread_of(self._telemetry.paces.lap()))
        self._records.append(record)
        self._tell(lambda listener: listener.on_epoch(record))

    def predictions(self, run: Run, measured: Measured | None, which: str) -> None:
        """Show examples and confusions of an evaluation of the `which` data, `test` or `validation`.

        It is done at growing intervals, as making pictures takes time, and at the end.
        """
        if measured is None or not self._listeners:
            return
        self._unshown = measured[0], which, run.data, run.state.samples_seen
        if run.state.samples_seen >= self._next_shown_samples:
            self._next_shown_samples = run.state.samples_seen * _SHOWN_GROWTH
            self._show_predictions()

    def _show_predictions(self) -> None:
        if self._unshown is None:
            return
        evaluation, which, data, samples_seen = self._unshown
        self._unshown, examples = None, evaluation.examples
        self._show_classes(evaluation, which, samples_seen)
        found = example_predictions(examples, Normalisation.of(data.mean, data.std), data.names_of_classes)
        if found is not None:
            self._tell(lambda listener: listener.on_predictions(found, samples_seen))

    def _show_classes(self, evaluation: Evaluation, which: str, samples_seen: int) -> None:
        if (counts := evaluation.class_counts) is not None and evaluation is not self._shown:
            self._shown = evaluation
            self._tell(lambda listener: listener.on_class_counts(counts, which, samples_seen))

    def decision(self, decision: Decision, samples_seen: int) -> None:
        """Announce a decision about the number of learners."""
        self.info = replace(self.info, num_learners=decision.num_learners)
        change = LearnerCount(
            decision.action, decision.num_learners, decision.reason, samples_seen, self.meter.elapsed_s, decision.source
        )
        self._tell(lambda listener: listener.on_learner_count(change))

    def workers(self, num_workers: int) -> None:
        """Note that another number of processes loads the data from now on."""
        self.info = replace(self.info, num_workers=num_workers)

    def progress(
        self,
        state: TrainState,
        learning_rate: float,
        planned_samples: int | None,
        num_learners: int,
        max_time_s: float | None = None,
    ) -> None:
        """Report progress, a few times a second; does nothing in between."""
        now = self._clock()
        if now < self._next_progress_s or not state.num_losses or not self._listeners:
            return
        self._next_progress_s = now + _PROGRESS_EVERY_S
        rate = self.meter.recent.images_per_s
        # Independent learners train on K images for every sample that the cursor moves.
        cursor_rate = rate if self.info.shares_samples else rate / self.info.num_learners
        ends: list[float] = []
        if planned_samples is not None and cursor_rate > 0:
            ends.append(max(0, planned_samples - state.samples_seen) / cursor_rate)
        if max_time_s is not None:
            ends.append(max(0.0, max_time_s - self.meter.elapsed_s))
        progress = Progress(
            samples_seen=state.samples_seen,
            epoch=state.samples_seen / self.info.num_train_samples,
            train_loss=state.train_loss,
            images_per_s=rate,
            learning_rate=learning_rate,
            num_learners=num_learners,
            elapsed_s=self.meter.elapsed_s,
            remaining_s=min(ends, default=None),
            data_wait_share=None if self.info.num_workers is None else self.meter.recent.wait_share,
            num_workers=self.info.num_workers,
            tokens_per_s=tokens_per_s(rate, self.info.tokens_per_sample),
            ranks=self._telemetry.paces.recent if self._telemetry else (),
            gpus=self._telemetry.gpus if self._telemetry else {},
            **measured_noise(state, num_learners * self.info.num_devices),
        )
        self._tell(lambda listener: None if listener.BLOCKS else listener.on_progress(progress))
        if any(listener.BLOCKS for listener in self._listeners):
            self.meter.pause()
            self._tell(lambda listener: listener.on_progress(progress) if listener.BLOCKS else None)
            self.meter.resume()

    def summarize(
        self, state: TrainState, status: str, stop_reason: str, final: Measured | None, saved: SavedModels
    ) -> Summary:
        """Build the summary and announce the end."""
        self._show_predictions()
        if final is not None:
            self._show_classes(final[0], "test", state.samples_seen)
        summary = self._summary(state, status, stop_reason, final, saved)
        missing = [f"the records of {type(listener).__name__}" for listener in self._dropped]
        if missing := [*missing, *(["the last checkpoint"] if self._lacks_checkpoint else [])]:
            self.message(f"Incomplete, as not all could be written: {', '.join(missing)}.")
        self._tell(lambda listener: listener.on_end(summary))
        return summary

    def record_hang(
        self, state: TrainState, folder: Path | None, hanging: Sequence[HangingRank], sentence: str
    ) -> None:
        """Write into the run's folder which ranks hang, past the listeners: their thread waits for these ranks."""
        if folder is None:
            return
        summary = self._summary(state, "failed", "rank_hangs", None, SavedModels(None, {}))
        write_json(folder / SUMMARY_FILE, asdict(replace(summary, hanging_ranks=tuple(hanging))))
        if (folder / CONSOLE_LOG).exists():  # not from Python
            with open(folder / CONSOLE_LOG, "a", encoding="utf-8", opener=own_file) as file:
                file.write(f"error: {sentence}\n")

    def _summary(
        self, state: TrainState, status: str, stop_reason: str, final: Measured | None, saved: SavedModels
    ) -> Summary:
        info, (test, each) = self.info, final or (None, ())
        # Over the whole run, earlier processes included. Independent learners each see all samples.
        images = state.samples_seen * (1 if info.shares_samples else info.num_learners)
        train_time_s = self.meter.elapsed_s
        images_per_s = images / train_time_s if train_time_s > 0 else 0.0
        paces = self._telemetry.paces.whole if self._telemetry else ()
        return Summary(
            experiment=info.experiment,
            status=status,
            stop_reason=stop_reason,
            device=info.device,
            executor=info.executor,
            precision=info.precision,
            averaging=info.averaging,
            model=info.model,
            data=info.data,
            num_learners=info.num_learners,
            num_devices=info.num_devices,
            batch_size=info.batch_size,
            epochs=state.samples_seen / info.num_train_samples,
            samples_seen=state.samples_seen,
            model_epoch=None if saved.samples_seen is None else saved.samples_seen / info.num_train_samples,
            test_accuracy=test.accuracy if test else None,
            test_loss=test.loss if test else None,
            best_test_accuracy=None if info.validates else state.best_accuracy,
            best_validation_accuracy=state.best_accuracy if info.validates else None,
            learner_test_accuracy=tuple(one.accuracy for one in each) or None,
            learners=self._learners(each, saved.samples_seen),
            data_wait_share=None if info.num_workers is None else self.meter.whole.wait_share,
            num_workers=info.num_workers,
            metrics=test.metrics if test else {},
            per_class=test.class_counts.figures() if test and test.class_counts else None,
            num_non_finite=test.num_non_finite if test else 0,
            time_to_accuracy_s=state.time_to_accuracy_s,
            train_time_s=train_time_s,
            wall_time_s=self.wall_s,
            images_per_s=images_per_s,
            tokens_per_s=tokens_per_s(images_per_s, info.tokens_per_sample),
            seed=info.seed,
            num_reseeded=state.num_reseeded,
            resumed_from=info.resumed_from,
            output_dir=info.output_dir,
            model_path=saved.path,
            model_sha256=saved.digests,
            versions=versions(),
            ranks=spread_of(paces),
            per_rank=paces or None,
        )

    def _learners(self, tested: Sequence[Evaluation], samples_seen: int | None) -> tuple[LearnerFigures, ...] | None:
        """Return independent learners as they were saved after so many samples; None of others, and unmeasured ones."""
        info = self.info
        last = next((own for own in reversed(self._records) if own.samples_seen == samples_seen), None)
        count = 0 if info.shares_samples else info.num_learners
        if count < 2 or not (tested or (last and last.learner_loss)):
            return None
        which, found = "validation" if info.validates else "test", []
        for place in range(count):
            values: dict[str, Any] = {}
            if last and last.learner_loss and last.learner_accuracy:
                values = {f"{which}_accuracy": last.learner_accuracy[place], f"{which}_loss": last.learner_loss[place]}
            if tested:
                values |= {"test_accuracy": tested[place].accuracy, "test_loss": tested[place].loss}
            settings = {name: each[place] for name, each in info.learner_settings.items()}
            found.append(LearnerFigures(settings=settings, **values))
        return with_best(found)

    def close(self) -> None:
        """Close every listener, once."""
        if not self._closed:
            self._closed = True
            for listener in [*self._listeners, *self._dropped]:
                listener.close()


def tokens_per_s(samples_per_s: float, tokens_per_sample: int | None) -> float | None:
    """Return the tokens that are trained on in a second; None but for language models."""
    return None if tokens_per_sample is None else samples_per_s * tokens_per_sample


def run_info(run: Run, planned_samples: int | None) -> RunInfo:
    """Return the facts that are fixed when training starts."""
    settings, several = run.settings, run.settings.has_several(run.ranks.num_ranks)
    first = settings.first_learners * run.ranks.num_ranks if settings.num_learners == "seesaw" else None
    measured = run.validation_feed or run.test_feed
    return RunInfo(
        experiment=run.arguments.experiment,
        model=run.names["model"],
        num_parameters=run.bank.num_values,
        data=run.names["data"],
        num_train_samples=run.num_samples,
        num_test_samples=run.test_feed.num_samples if run.test_feed else 0,
        device=str(run.choices.device),
        executor=run.choices.executor,
        precision=run.choices.precision.name,
        averaging=run.rule.NAME,
        num_learners=run.bank.num_learners,
        num_devices=run.ranks.num_ranks,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        seed=settings.seed,
        validates=run.validation_feed is not None,
        shares_samples=run.rule.has_central_model,
        samples_seen=run.state.samples_seen,
        planned_samples=planned_samples,
        num_workers=run.num_workers,
        output_dir=str(run.output_dir) if run.output_dir else None,
        resumed_from=run.resumed_from,
        trace_path=str(run.output_dir / TRACE_FILE) if run.output_dir and run.timeline else None,
        average_ema=run.rule.average_ema,
        averaging_settings=averaging_settings(run.rule, first) if several else (),
        several=several,
        has_accuracy=not (isinstance(run.data.train, tuple) and run.data.train[1].is_floating_point()),
        replicas_differ=run.rule.has_central_model and not run.bank.replicas_identical,
        learning_statistics=settings.learning_statistics,
        tokens_per_sample=run.tokens_per_sample,
        measures_noise=run.state.noise is not None,
        metrics=run.evaluator.metric_names(measured) if measured else (),
        hyper_parameters=hyper_parameters(run),
        learner_settings={} if run.rule.has_central_model else run.optimizer.lists(),
    )


def measured_noise(state: TrainState, num_learners: int) -> dict[str, float | None]:
    """Return the gradient noise scale and the efficiency of K learners on all devices, None where not known."""
    scale = None if state.noise is None else state.noise.samples
    if state.noise is None or scale is None:
        return {"noise_scale_samples": None, "efficiency": None}
    finite = scale if math.isfinite(scale) else None
    return {"noise_scale_samples": finite, "efficiency": state.noise.efficiency(num_learners)}


def hyper_parameters(run: Run) -> dict[str, bool | int | float | str]:
    """Return what runs are compared by: settings and groups, by the command line's dotted keys."""
    plain = {**to_mapping(run.settings), **run.names, "num_devices": run.ranks.num_ranks}
    chosen = {"executor": run.choices.executor, "precision": run.choices.precision.name}
    names = {name: group.NAME for name, group in run.groups.items()}
    return flat({**plain, **chosen, **names}) | flat({name: to_mapping(group) for name, group in run.groups.items()})


def averaging_settings(rule: AveragingRule, first: int | None) -> tuple[str, ...]:
    """Describe the rule's settings that are not its defaults, and how it scales the rate, at `first` if K grows."""
    scaled = _SCALED.get(getattr(rule, "rate_scaling", ""))
    left_out = ("average_ema", "rate_scaling" if scaled else "")
    words = [f"{name}={written(value)}" for name, value in apart_from_defaults(rule).items() if name not in left_out]
    if scaled and first is not None:
        scaled = f"{scaled.replace('K', str(first))} at first" if first > 1 else None
    return (*words, *([scaled] if scaled else []))


def epoch_record(
    run: Run,
    lap: Lap,
    learning_rate: float,
    measured: Measured | None,
    which: str,
    learning: LearningStatistics | None = None,
) -> EpochRecord:
    """Return the record of an epoch that closes now, or of a run that stops inside one. Reads the bank: drain before.

    Args:
        which: the data that `measured` is about, `test` or `validation`.
        learning: the statistics of learning, if asked for.
    """
    state, images_per_s = run.state, lap.images_per_s
    evaluation, each = measured or (None, ())
    loss, accuracy = (evaluation.loss, evaluation.accuracy) if evaluation else (None, None)
    central, validates = run.rule.has_central_model, which == "validation"
    epochs = state.samples_seen / run.num_samples
    return EpochRecord(
        epoch=int(epochs) if epochs >= state.closed_epochs + 1 else round(epochs, 4),
        samples_seen=state.samples_seen,
        train_loss=state.train_loss,
        train_accuracy=state.train_accuracy(run.settings.samples_per_step),
        test_loss=None if validates else loss,
        test_accuracy=None if validates else accuracy,
        validation_loss=loss if validates else None,
        validation_accuracy=accuracy if validates else None,
        learner_accuracy=tuple(one.accuracy for one in each) or None,
        learner_loss=tuple(one.loss for one in each) or None,
        images_per_s=images_per_s,
        images_per_s_per_device=images_per_s / run.ranks.num_ranks,
        tokens_per_s=tokens_per_s(images_per_s, run.tokens_per_sample),
        num_learners=run.bank.num_learners,
        learning_rate=learning_rate,
        elapsed_s=state.elapsed_s,
        spread=spread(run) if central else None,
        correction_norm=run.bank.correction_norm() if central else None,
        data_wait_share=lap.wait_share if run.train_feed.STREAMS else None,
        num_workers=run.num_workers,
        metrics=evaluation.metrics if evaluation else {},
        learning=learning,
        **measured_noise(state, run.bank.total_learners),
        num_non_finite=evaluation.num_non_finite if evaluation else 0,
        ranks=None,  # which the reporter knows
    )


def example_predictions(
    examples: Examples | None, normalisation: Normalisation | None, class_names: Sequence[str] = ()
) -> Predictions | None:
    """Return images and predictions; None for images that are neither grey nor RGB, and for non-finite values.

    `normalisation` is undone, and the values of all images together are stretched to 0 to 255.
    """
    if examples is None or examples.inputs.shape[1] not in _CHANNELS:
        return None
    if not _are_finite(examples.inputs) or not _are_finite(examples.outputs):
        return None
    values = examples.inputs.float()
    if values.ndim == 5:
        values = values[:, :, values.shape[2] // 2]
    mean, std = (normalisation or IDENTITY).constants(values, torch.float32)
    values = values * std + mean
    low, high = float(values.min()), float(values.max())
    values = (values - low) / (high - low) if high > low else values
    probabilities, predicted = examples.outputs.float().softmax(1).max(1)
    return Predictions(
        images=values.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).contiguous().numpy(),
        targets=tuple(map(int, examples.targets)),
        predicted=tuple(map(int, predicted)),
        probabilities=tuple(map(float, probabilities)),
        class_names=tuple(class_names),
    )


def _are_finite(values: Tensor) -> bool:
    return values.is_floating_point() and bool(values.isfinite().all())
