"""The trainer: what a run is made of, what makes two runs the same, and `fit`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import nn

from crossbow_py.averaging import SMA, AveragingRule
from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.given_path import given_path
from crossbow_py.core.signals import StopSignal
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.device.denormals import flushed_denormals
from crossbow_py.engine.modules.precision import PrecisionName, device_uuids, ordinary_modes
from crossbow_py.engine.rounds import Loss
from crossbow_py.engine.update.optimizers import SGD, Optimizer
from crossbow_py.telemetry.events import Listener, RoundEnd
from crossbow_py.telemetry.profile import OperatorProfile
from crossbow_py.telemetry.records import file_listeners
from crossbow_py.telemetry.timeline import Timeline, TimelineFile
from crossbow_py.train.build import DataSets, build_parts
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings, SavedCheckpoint, holds_run
from crossbow_py.train.checkpoints.resume import choose_alike, saved_run
from crossbow_py.train.checks.compatibility import check_compatible
from crossbow_py.train.checks.seeded_model import MakeModel
from crossbow_py.train.evaluation.evaluator import Evaluation, Metric
from crossbow_py.train.loop import TrainingLoop
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Result
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.run_state import RunState
from crossbow_py.train.schedules import Constant, Schedule
from crossbow_py.train.stopping import StopConditions
from crossbow_py.train.tuning.busy_cores import busy_cores
from crossbow_py.train.tuning.learner_tuning import learner_tuning
from crossbow_py.train.tuning.worker_autotuner import worker_supply

_BUILDING = threading.RLock()


@contextmanager
def _by_turns() -> Iterator[None]:
    """Have one thread at a time build a trainer, which seeds the process's generators and puts them back."""
    with _BUILDING, ordinary_modes():
        yield


class Trainer:
    """Trains `num_learners` replicas of a model on one device, kept together by an averaging rule.

    Args:
        model: a function without arguments that returns an `nn.Module`, such as a class; called once.
        train_data: a map-style data set of (input, target), or two tensors: inputs [N, ...] and targets [N].
        test_data: the same; without it nothing is evaluated, unless there is validation data.
        validation_data: the same; it then feeds stops and the best accuracy, and test is measured once, at the end.
        num_classes: checked against the model's output when the loss is cross-entropy.
        optimizer: what a learner does with its gradient.
        schedule: how its learning rate moves.
        averaging: what keeps learners together.
        loss: `f(outputs [B, ...], targets [B, ...])`, a batch mean.
        metrics: further functions like `loss` to evaluate, by name; they are in `result.summary.metrics`.
        augmentation: of training images, for uint8 tensors [N, C, H, W].
        mean: what inputs are normalised by, one number a channel or one for all; pixels count as 0 to 1. With `std`.
        std: standard deviation, likewise.
        output_dir: where the run is recorded; nothing is written to disk without it.
        resume: a run folder, its checkpoints folder, or one checkpoint to go on from; `auto` is the newest in
            `output_dir`, and a fresh start where there is none.
        init_from: safetensors to start from (fine-tuning).
        checkpoint: when checkpoints are written, with an `output_dir`.
        callbacks: listeners, called from the training loop's thread.
        experiment: name of the run in records.
        names: how the model and the data are called in records: `{"model": ..., "data": ...}`.
        class_names: what classes are called in pictures of predictions; None takes `test_data.classes`, where it is.
        max_evaluation_batches: look at no more than that many batches in an evaluation.
        notes: sentences the listeners are told when training starts.
        trace: write a timeline of tasks to trace.json in `output_dir`, which must be given.
        profile: write the operators of half a second of training, by time, to profile.txt and profile.json.gz.
        distributed: what a run over several ranks can be told.
        ranks: of `joined()`, with which one script under torchrun trains on all devices; every rank calls the same. The
            first one writes to disk. Data sets and settings must be alike; samples are shared out.
        batch_size: samples a learner takes per round.
        num_learners: K, replicas trained side by side; `auto` finds the fastest number.
        max_learners: the most that `auto` may take.
        executor: how learners run: `serial`, `threads`, `fused`, `fused_threads`, on CUDA `streams`, `subarrays2` and
            `subarrays4`; `auto` measures which is the fastest.
        device: where they run.
        precision: compute format; weights are float32 in any case. `auto` is bf16 where that is fast.
        channels_last: channels-last memory format for images and 4-D weights.
        compile_model: run learners' models through `torch.compile` first (`serial`, `threads`, `streams`).
        seed: of initialisation, sample order, augmentation and dropout.
        on_nonfinite: a learner whose loss is not finite stops the run, or is cloned anew from the average model.
        num_workers: processes that load data which does not live on the device; `auto` keeps learners fed.
        order_seed: of the sample order alone; None is `seed`.
        label_smoothing: share of the target spread over all classes, in the cross-entropy that is trained on.
        learning_statistics: measure gradient noise scale, sharpness and agreement at the end of every epoch.
        executor_cache: the file in which `executor="auto"` remembers what it measured; None is that of the user.

    On CPU with several learners the process is told to keep freed memory, in huge pages.

    Raises:
        UserError: settings, data and model do not fit each other.
    """

    @_by_turns()
    def __init__(
        self,
        *,
        model: MakeModel,
        train_data: Data,
        test_data: Data | None = None,
        validation_data: Data | None = None,
        num_classes: int | None = None,
        optimizer: Optimizer = SGD(),
        schedule: Schedule = Constant(),
        averaging: AveragingRule = SMA(),
        loss: Loss = nn.functional.cross_entropy,
        metrics: Mapping[str, Metric] | None = None,
        augmentation: Augmentation | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        output_dir: str | Path | None = None,
        resume: str | Path | None = None,
        init_from: str | Path | None = None,
        checkpoint: CheckpointSettings = CheckpointSettings(),
        callbacks: Sequence[Listener] = (),
        experiment: str = "custom",
        names: Mapping[str, str] | None = None,
        max_evaluation_batches: int | None = None,
        notes: Sequence[str] = (),
        trace: bool = False,
        profile: bool = False,
        distributed: DistributedSettings = DistributedSettings(),
        ranks: Ranks = ALONE,
        batch_size: int = 16,
        num_learners: int | Literal["auto"] = "auto",
        max_learners: int = 8,
        executor: str = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        precision: PrecisionName = "auto",
        channels_last: bool = True,
        compile_model: bool = False,
        seed: int = 0,
        on_nonfinite: Literal["stop", "reseed"] = "stop",
        num_workers: int | Literal["auto"] = "auto",
        order_seed: int | None = None,
        label_smoothing: float = 0.0,
        learning_statistics: bool = False,
        executor_cache: str | Path | None = None,
    ) -> None:
        settings, begun, folder = RunSettings.of(locals()), time.monotonic(), _path("output_dir", output_dir)
        self.callbacks, self._continues, self._profile = callbacks, resume == "auto", profile
        check_compatible(settings, optimizer, schedule, averaging, loss, max_evaluation_batches, ranks)
        found, self._messages = saved_run(resume, folder, ranks)
        data = DataSets(train_data, test_data, validation_data, num_classes, augmentation, mean, std, class_names)
        parts = build_parts(
            model, data, settings, choose_alike(settings, found, ranks), optimizer=optimizer, rule=averaging,
            loss=loss, metrics=metrics or {}, init_from=_initial(init_from, found), announce=self._announce,
            max_evaluation_batches=max_evaluation_batches, timeline=_timeline(trace, profile, folder), ranks=ranks,
            executor_cache=_path("executor_cache", executor_cache))  # fmt: skip
        self._messages += [*notes, *parts.warnings]
        self.run = Run(parts, data, settings, schedule, checkpoint, folder, experiment, _named(model, names),
                       str(found.folder) if found else None, distributed)  # fmt: skip
        _make_ready(self.run, found, begun)

    @property
    def state(self) -> RunState:
        """Where training stands."""
        return self.run.state

    @property
    def choices(self) -> Choices:
        """What `auto` became: device, precision, executor, and the seconds that choosing an executor took."""
        return self.run.parts.choices

    @ordinary_modes()
    def fit(
        self,
        *,
        max_epochs: float | None = None,
        max_samples: int | None = None,
        max_time_s: float | None = None,
        target_accuracy: float | None = None,
        target_loss: float | None = None,
        max_rounds: int | None = None,
        handle_signals: bool = False,
        after_round: Callable[[RoundEnd], int | None] | None = None,
    ) -> Result:
        """Train until the first stop condition is met; a second call goes on where the first ended.

        Args:
            max_epochs: passes over the training data, counted since the run began.
            max_samples: samples seen, likewise.
            max_time_s: seconds of training, likewise, without evaluation.
            target_accuracy: of the validation data where there is some, else of the test data; between 0 and 1.
            target_loss: likewise.
            max_rounds: rounds of this call.
            handle_signals: on SIGTERM and Ctrl-C write a checkpoint and return with status terminated or interrupted.
            after_round: called by the loop's thread once a round is submitted and the one before is over. It may block,
                and returns with how many learners to go on; None leaves that to the auto-tuner. All ranks return alike.

        Raises:
            NonFiniteError: a learner's loss is not finite and `on_nonfinite` is stop.
            LearnerError: a task failed.
        """
        if max_rounds is not None and max_rounds > 0:
            max_rounds += self.state.round_index
        stops = StopConditions(max_epochs, max_samples, max_time_s, max_rounds, target_accuracy, target_loss)
        listeners = list(self.callbacks)
        with self.run.parts.ranks.together():
            if self.run.parts.ranks.is_first:
                listeners = [*self._file_listeners(), *listeners]
        with (
            flushed_denormals(),
            TrainingLoop(self.run, stops, listeners, after_round) as loop,
            StopSignal(handle_signals) as signals,
        ):
            loop.start(self._messages)
            self._messages = []
            status, reason = loop.run(signals)
            return loop.finish(status, reason)

    @ordinary_modes()
    def evaluate(self) -> Evaluation:
        """Measure the current model (independent learners: their mean) on the test data. Raises UserError without."""
        try:
            measured = self.run.evaluate("test")
        finally:
            self.run.parts.close_feeds()
        if measured is None:
            raise UserError("evaluate() needs test_data, got none; give Trainer(test_data=...).")
        return measured[0]

    def restart(self) -> None:
        """Restart the learners from the average model, between two calls of `fit`; see `SMA.restart_momentum`.

        Raises UserError where learners are independent.
        """
        if not self.run.parts.rule.has_central_model:
            raise UserError("restart() needs an average model, which independent learners lack; use averaging=SMA().")
        self.run.parts.restart(self.state.sick_learners)

    def _announce(self, message: str) -> None:
        for listener in self.callbacks:
            listener.on_message(message)

    def _file_listeners(self) -> list[Listener]:
        folder, begun = self.run.output_dir, self.state.round_index > 0
        if folder is None:
            return []
        if not (begun or self._continues) and holds_run(folder):
            raise UserError(
                f"output_dir {folder} already holds a run; give resume='auto' to continue it, or another folder."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            uuids = device_uuids(self.run.parts.choices.device)
            listeners = file_listeners(
                folder, self.state.samples_seen if begun else None, uuids, self.state.closed_epochs
            )
        except OSError as error:
            raise unwritable(folder, error) from error
        timeline = self.run.parts.timeline
        listeners += [TimelineFile(timeline, folder)] if timeline is not None else []
        return [*listeners, *([OperatorProfile(folder)] if self._profile else [])]


def _named(model: MakeModel, names: Mapping[str, str] | None) -> dict[str, str]:
    """How the model and the data are called in records."""
    return {"model": getattr(model, "__name__", type(model).__name__), "data": "custom", **(names or {})}


def _make_ready(run: Run, found: SavedCheckpoint | None, begun_s: float) -> None:
    """Tuning as far as it is asked for, and where the checkpoint stood. All ranks together.

    What all of it took since `begun_s`, on the monotonic clock, belongs to the run.
    """
    ranks = run.parts.ranks
    run.tuning = learner_tuning(run.settings.num_learners, run.parts.most_learners)
    run.supply = worker_supply(run.settings.num_workers, run.parts.train_feed, ranks.num_local)
    is_alone = ranks.num_local == 1 and not run.parts.train_feed.STREAMS
    run.busy_cores = busy_cores(run.parts.choices.executor, run.parts.choices.device.type, is_alone)
    with ranks.together():
        if found:
            run.restore(found)
    run.state.wall_s += time.monotonic() - begun_s


def _initial(init_from: str | Path | None, found: SavedCheckpoint | None) -> str | None:
    """What a fresh run begins with; one that goes on has its own weights."""
    return None if init_from is None or found else str(given_path("init_from", init_from))


def _path(name: str, path: str | Path | None) -> Path | None:
    return None if path is None else given_path(name, path)


def _timeline(trace: bool, profile: bool, output_dir: Path | None) -> Timeline | None:
    for name, asked in (("trace", trace), ("profile", profile)):
        if asked and output_dir is None:
            raise UserError(f"{name} writes into the run's folder, got no output_dir; set one, or {name}=false.")
    return Timeline() if trace else None
