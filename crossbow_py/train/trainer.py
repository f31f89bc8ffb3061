"""The trainer: builds a run, trains it in `fit`, and evaluates its model."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec

from torch import nn

from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import shown
from crossbow_py.core.signals import StopSignal
from crossbow_py.data.datasets import Data
from crossbow_py.engine.device.host import flushed_denormals
from crossbow_py.engine.modules.precision import ordinary_modes
from crossbow_py.telemetry.events import Listener, RoundEnd
from crossbow_py.telemetry.profile import OperatorProfile
from crossbow_py.telemetry.records import file_listeners, node_listeners
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.telemetry.timeline import Timeline, TimelineFile
from crossbow_py.train.arguments import TrainArguments, check_keywords, keywords, with_keywords_of
from crossbow_py.train.build import RunBuilder
from crossbow_py.train.checkpoints.checkpoint import holds_run
from crossbow_py.train.checkpoints.resume import choose_together, find_checkpoint, restore
from crossbow_py.train.checks.compatibility import check_compatible, check_tuner
from crossbow_py.train.evaluation.current_models import current_models, evaluate
from crossbow_py.train.evaluation.evaluator import Evaluation
from crossbow_py.train.evaluation.new_data import Predicted, evaluate_on, predict
from crossbow_py.train.loop.average_model import restart
from crossbow_py.train.loop.rank_telemetry import RankTelemetry, node_name, ranks_beside
from crossbow_py.train.loop.round_listener import AfterRound, HostTuning
from crossbow_py.train.loop.training_loop import TrainingLoop
from crossbow_py.train.run_folder.reporter import Reporter, Result
from crossbow_py.train.run_settings import Choices, StopConditions
from crossbow_py.train.train_state import TrainState
from crossbow_py.train.tuning.range_test import LearningRateTest, find_learning_rate

P = ParamSpec("P")

_BUILDING = threading.RLock()


@contextmanager
def _by_turns() -> Iterator[None]:
    """Let one thread at a time build a trainer: building seeds the process's generators and restores them."""
    with _BUILDING, ordinary_modes():
        yield


def _suggesting(fit: Callable[P, Result]) -> Callable[P, Result]:
    """Have `fit` raise TypeError with a suggestion for arguments that it does not take."""

    @functools.wraps(fit)
    def checked(*trainer: P.args, **given: P.kwargs) -> Result:
        if len(trainer) > 1:
            raise TypeError(
                "fit() takes keyword arguments alone, as in fit(max_epochs=10); the model and the data are Trainer's: "
                "Trainer(model=..., train_data=...)."
            )
        check_keywords(given, keywords(fit), keywords(TrainArguments), in_fit=True)
        return fit(*trainer, **given)

    return checked


class Trainer:
    """Trains `num_learners` replicas of a model on one device, kept together by an averaging rule.

    Args:
        model: a function without arguments that returns an `nn.Module`, such as a class; called once.
        train_data: a map-style data set of (input, target), or two tensors or NumPy arrays: inputs [N, ...] and targets
            [N].
        test_data: data in the same form; without it nothing is evaluated, unless there is validation data.
        validation_data: data in the same form. Stops and the best accuracy then use it, and the test data is evaluated
            once, at the end.
        num_classes: number of classes, checked against the model's output when the loss is cross-entropy.
        optimizer: updates a learner's weights from its gradient; a name such as "adamw" has its default settings. None
            is `SGD(learning_rate=0.03)` for cross-entropy and losses that models return, and
            `AdamW(learning_rate=0.01)` for others.
        schedule: the learning rate as a function of samples seen; or a name. None is constant; without an optimizer a
            cosine to zero, if the run's length is known, which begins anew where a second `fit` sets a later end.
        averaging: the rule that keeps learners together; or a name.
        loss: `f(outputs [B, ...], targets [B, ...])`, a batch mean. None is cross-entropy; or, if forward takes
            `labels` and the data's inputs are dicts, `model_loss`, what the model itself returns.
        standardize_targets: for regression on targets of any unit, floating tensors [N] or [N, D]: what the model
            returns counts in standard deviations from the mean of the training targets, and so does the training
            loss. Two buffers of it, `target_mean` and `target_std`, turn it into the targets' own unit, in which test
            losses, metrics and predictions are. "auto" is where no optimizer and no `init_from` is given and the loss
            is torch's squared or absolute error, such as `nn.MSELoss()`.
        metrics: further functions like `loss` to evaluate, by name, or metrics with states, as torchmetrics has them;
            they are in `result.summary.metrics`.
        augmentation: augmentation of training images, uint8 tensors [N, C, H, W].
        mean: mean that inputs are normalised by, one number per channel or one for all, for pixels from 0 to 1. Needs
            `std`.
        std: standard deviation that inputs are normalised by, likewise.
        sample_weights: one weight for each training sample, [N]: an epoch is N draws with replacement in proportion to
            them, instead of every sample once. `sampling="balanced"` weighs by class.
        class_names: names of the classes in pictures of predictions; None is `test_data.classes`, if it has them.
        output_dir: the run's folder; without it nothing is written to disk.
        resume: a run folder, its checkpoints folder, or one checkpoint to resume from; `auto` is the newest in
            `output_dir`, or a fresh start if there is none.
        init_from: safetensors file with the initial weights (fine-tuning).
        checkpoint: when checkpoints are written, if there is an `output_dir`.
        callbacks: listeners, called from the training loop's thread; loggers on the first rank alone.
        tensorboard: write TensorBoard's files to `output_dir`, if there is one.
        experiment: name of the run in records.
        names: names of the model and the data in records: `{"model": ..., "data": ...}`.
        max_evaluation_batches: the most batches to evaluate on; None is all.
        notes: messages for the listeners when training starts.
        trace: write a timeline of tasks to trace.json in `output_dir`, which must be given.
        profile: write the operators of half a second of training, by time, to profile.txt and profile.json.gz.
        distributed: settings of a run over several ranks.
        auto_tuner: what num_learners="auto" goes by.
        ranks: the ranks of `joined()`, with which one script under torchrun trains on all devices. Every rank makes the
            same calls with the same data sets and settings; samples are divided among them, and the first rank writes
            to disk.
        executor_cache: the file in which `executor="auto"` remembers its measurements; None is the user's.

    The other keywords are keys of the command line: batch_size, num_learners, executor, device, precision, seed and so
    on, as `RunSettings` explains them. By default the number of learners is tuned by measured speed, so that two runs
    of one seed may differ; with `num_learners=2` they do not. Figures are measured in the precision of training, which
    may be bf16; `model` and `predict` are in float32. With `num_learners="seesaw"` learners come as the schedule lowers
    the rate, from `min_learners` to `max_learners`. Warnings go to `on_message` of the callbacks.

    On a CPU with several learners the process keeps freed memory, in huge pages.

    Raises:
        UserError: settings, data and model do not fit each other.
    """

    @with_keywords_of(TrainArguments, of_fit=lambda: Trainer.fit)
    def __init__(self, arguments: TrainArguments) -> None:
        with _by_turns():
            self._build(arguments)

    def _build(self, given: TrainArguments) -> None:
        begun, ranks, self.callbacks = time.monotonic(), given.ranks, given.callbacks
        folder = None if given.output_dir is None else given_path("output_dir", given.output_dir)
        _check_callbacks(given.callbacks)
        check_tuner(given.auto_tuner)
        check_compatible(
            given.settings, *given.rules, given.loss, given.max_evaluation_batches,
            ranks,
        )  # fmt: skip
        found, self._messages = find_checkpoint(given.resume, folder, ranks)
        self._loop: TrainingLoop | None = None
        self._told: set[str] = set()
        self.run = RunBuilder(
            given,
            choices=choose_together(given.settings, found, ranks),
            announce=self._announce,
            resumed_from=str(found.folder) if found else None,
            output_dir=folder,
            timeline=_timeline(given, folder),
        ).build()
        self._messages += [*given.notes, *self.run.warnings]
        with ranks.together():
            if found:
                self._messages += restore(self.run, found)
        self.state.wall_s += time.monotonic() - begun  # building counts as time of the run

    @property
    def state(self) -> TrainState:
        """The counters of training."""
        return self.run.state

    @property
    def choices(self) -> Choices:
        """The values chosen for `auto`: device, precision, executor; and the seconds that choosing an executor took."""
        return self.run.choices

    @_suggesting
    @ordinary_modes()
    def fit(
        self,
        *,
        max_epochs: float | None = None,
        max_samples: int | None = None,
        max_time_s: float | None = None,
        target_accuracy: float | None = None,
        target_loss: float | None = None,
        patience: int | None = None,
        restore_best: bool = False,
        max_rounds: int | None = None,
        counts_earlier_rounds: bool = False,
        handle_signals: bool = False,
        after_round: Callable[[RoundEnd], int | None] | None = None,
    ) -> Result:
        """Train until the first stop condition is met; a second call continues where the first ended.

        Args:
            max_epochs: passes over the training data, counted since the run began.
            max_samples: samples seen, counted since the run began.
            max_time_s: seconds of training since the run began, without evaluation.
            target_accuracy: accuracy to reach, between 0 and 1, on the validation data if there is any, else on the
                test data.
            target_loss: loss to reach, on the same data.
            patience: stop after this many evaluations in a row that were not the best yet, on the same data. The best
                has the highest accuracy, or the lowest loss where there is no accuracy; the run returns its model.
            restore_best: return and save the model of the best evaluation, not the last one; `patience` implies it.
            max_rounds: rounds of this call.
            counts_earlier_rounds: count `max_rounds` since the run began, as the other conditions, also if it is
                resumed.
            handle_signals: on SIGTERM and Ctrl-C write a checkpoint and return with status terminated or interrupted.
            after_round: called by the loop's thread once a round is submitted and the one before is over. It may block.
                With num_learners=auto it may return the number of learners per device to continue with, the same on
                all ranks, also above max_learners; None leaves that to the auto-tuner.

        Raises:
            UserError: the stop conditions, or what `after_round` returned.
            NonFiniteError: a learner's loss is not finite and `on_nonfinite` is stop.
            LearnerError: a task failed.
        """
        stops = StopConditions(
            max_epochs, max_samples, max_time_s, max_rounds, target_accuracy, target_loss, patience, restore_best
        )
        if max_rounds is not None and not counts_earlier_rounds:
            stops = dataclasses.replace(stops, max_rounds=self.state.round_index + max_rounds)
        _check_call(after_round)
        with self.run.ranks.together():
            monitor = self._new_monitor()
            listeners = [*self._file_listeners(monitor), *self._own_listeners()]
        try:
            with (
                flushed_denormals(),
                nullcontext() if monitor is None else closing(monitor),  # without TensorBoard no listener does
                self._new_loop(stops, listeners, monitor, after_round) as self._loop,
                StopSignal(handle_signals) as signals,
            ):
                return self._loop.train(self._messages, signals)
        finally:
            self._loop = None

    def _new_loop(
        self,
        stops: StopConditions,
        listeners: Sequence[Listener],
        monitor: SystemMonitor | None,
        after_round: Callable[[RoundEnd], int | None] | None,
    ) -> TrainingLoop:
        """Return a training loop and what is attached to it: ranks' figures, tuning of the host, `after_round`."""
        run, idle = self.run, self.run.ranks.watch.idle
        meter = ThroughputMeter(waited_for_ranks_s=lambda: idle.seconds)
        telemetry = RankTelemetry(run, meter, monitor)
        reporter = Reporter(listeners, meter, telemetry=telemetry)
        loop = TrainingLoop(run, stops, reporter, telemetry.exchange, self._told)
        loop.attach(HostTuning(run, loop.learners, reporter))
        if after_round is not None:
            loop.attach(AfterRound(after_round, run, loop.learners, reporter))
        return loop

    @property
    def model(self) -> nn.Module:
        """A copy of the current model, in float32 and evaluation mode: what `Result.model` would be.

        That is the average model or its EMA; of independent learners the first one; right after `fit` what it returned.
        It is there before `fit`, after Ctrl-C or an error, and in `Listener.on_epoch`. All ranks ask for it together.

        Raises UserError while a round is in flight, as in other callbacks or threads.
        """
        with self._between_rounds():
            return current_models(self.run)[0]

    def evaluate(self, data: Data | None = None) -> Evaluation:
        """Evaluate the current model, as `model` has it; of independent learners return the mean.

        Args:
            data: data in the form of `test_data`; None is `test_data` itself.

        Raises UserError for data that do not fit the model, without any, and while a round is in flight.
        """
        with self._between_rounds():
            if data is not None:
                return evaluate_on(self.run, data)
            measured = evaluate(self.run, "test")
        if measured is None:
            raise UserError("evaluate() needs test_data, got none; give Trainer(test_data=...), or evaluate(data).")
        return measured[0]

    def predict(self, data: Any) -> Predicted:
        """Return the outputs of the current model, as `model` has it, and the predicted classes if there are classes.

        Inputs are normalised as in evaluation and taken in batches. The model runs in float32 and evaluation mode.

        Args:
            data: inputs alone: a tensor or an array [N, ...], a dict of such, or a map-style data set of inputs. Or
                data in the form of `test_data`, whose targets are not looked at.

        Raises UserError for data that do not fit the model, and while a round is in flight.
        """
        with self._between_rounds():
            return predict(self.run, data)

    def find_learning_rate(
        self, *, num_rounds: int = 100, lowest: float = 1e-6, highest: float = 10.0
    ) -> LearningRateTest:
        """Find a learning rate by a range test (Smith 2017): the rate at which the training loss falls fastest.

        A copy of the learners trains `num_rounds` rounds on the batches that come next, at rates that rise
        exponentially from `lowest` to `highest`, until it diverges. The trainer and the random generators stay as they
        are. Rates are `optimizer.learning_rate`, without schedule and warm-up; those of other learners and of other
        parameters rise in proportion. With num_learners="auto" it takes as many learners as there are now. All ranks
        call it together.

        Raises UserError for arguments that make no test, and while a round is in flight.
        """
        with self._between_rounds():
            return find_learning_rate(self.run, num_rounds, lowest, highest)

    def restart(self) -> None:
        """Restart the learners from the average model, between two calls of `fit`; see `SMA.restart_momentum`.

        Raises UserError where learners are independent.
        """
        if not self.run.rule.has_central_model:
            raise UserError("restart() needs an average model, which independent learners lack; use averaging=SMA().")
        restart(self.run)

    @contextmanager
    def _between_rounds(self) -> Iterator[None]:
        """Let the caller read the bank. Raises UserError while a round is in flight."""
        if self._loop is not None and self._loop.learners.in_flight:
            raise UserError(
                "the current model cannot be read while a round is in flight; ask for it in Listener.on_epoch, or "
                "before or after fit()."
            )
        is_own = self._loop is None
        try:
            with ordinary_modes():
                yield
        finally:
            if is_own:
                self.run.close_feeds()

    def _announce(self, message: str) -> None:
        for listener in self.callbacks:
            listener.on_message(message)

    def _own_listeners(self) -> list[Listener]:
        return [each for each in self.callbacks if self.run.ranks.is_first or not each.ONLY_FIRST_RANK]

    def _new_monitor(self) -> SystemMonitor | None:
        """Return the monitor of this rank's node, if this rank is the first on it and the run has a folder."""
        run = self.run
        beside = ranks_beside(run.places, run.ranks.rank)
        if run.output_dir is None or beside[0] != run.ranks.rank:
            return None
        return SystemMonitor([uuid for rank in beside for uuid in run.places[rank].device_uuids])

    def _file_listeners(self, monitor: SystemMonitor | None) -> list[Listener]:
        """Return the listeners that write to the run's folder: the first rank's, and those of each other node."""
        folder, begun = self.run.output_dir, self.state.round_index > 0
        if folder is None or monitor is None:
            return []
        resumed = self.state.samples_seen if begun else None
        if not self.run.ranks.is_first:
            name = node_name(self.run.places, self.run.ranks.rank)
            return node_listeners(folder, resumed, monitor, name) if self.run.arguments.tensorboard else []
        if not (begun or self.run.arguments.resume == "auto") and holds_run(folder):
            raise UserError(
                f"output_dir {folder} already holds a run; give resume='auto' to continue it, or another folder."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            charts = self.run.arguments.tensorboard
            listeners = file_listeners(folder, resumed, monitor, self.state.closed_epochs, charts)
        except OSError as error:
            raise unwritable(folder, error) from error
        timeline = self.run.timeline
        if timeline is not None:
            listeners.append(TimelineFile(timeline, folder))
        return [*listeners, OperatorProfile(folder)] if self.run.arguments.profile else listeners


def _check_call(after_round: object) -> None:
    if after_round is not None and not callable(after_round):
        raise UserError(f"after_round must be a function of a RoundEnd, got {after_round!r}; give one, or None.")


def _check_callbacks(callbacks: Sequence[Listener]) -> None:
    """Raise UserError for what is no list of listeners."""
    is_list = isinstance(callbacks, list | tuple)
    unfit = [each for each in callbacks if not isinstance(each, Listener)] if is_list else [callbacks]
    if unfit:
        raise UserError(
            f"callbacks must be a list of objects of crossbow_py.Listener, got {shown(unfit[0])}; write it as "
            "callbacks=[MLflowLogger()]."
        )


def _timeline(arguments: TrainArguments, folder: Path | None) -> Timeline | None:
    for name, asked in (("trace", arguments.trace), ("profile", arguments.profile)):
        if asked and folder is None:
            raise UserError(f"{name} writes into the run's folder, got no output_dir; set one, or {name}=false.")
    return Timeline() if arguments.trace else None
