"""The trainer: what a run is made of, what makes two runs the same, and `fit`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from crossbow_py.assembly import DataSets, MakeModel, build_parts
from crossbow_py.averaging import SMA, AveragingRule
from crossbow_py.checkpoint import (
    CheckpointSettings,
    SavedCheckpoint,
    find_newest,
    holds_run,
    open_checkpoint,
    taking_from,
)
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.optimizers import SGD, Optimizer
from crossbow_py.engine.precision import PrecisionName, device_uuids
from crossbow_py.engine.rounds import Loss
from crossbow_py.errors import UserError
from crossbow_py.evaluation import Evaluation, Metric
from crossbow_py.run import Run
from crossbow_py.run_settings import Choices, RunSettings, choose
from crossbow_py.run_state import RunState
from crossbow_py.schedules import Constant, Schedule
from crossbow_py.signals import StopSignal
from crossbow_py.stopping import StopConditions
from crossbow_py.supply import worker_supply
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.records import file_listeners
from crossbow_py.telemetry.timeline import Timeline, TimelineFile
from crossbow_py.training_loop import Result, TrainingLoop
from crossbow_py.tuning import learner_tuning


class Trainer:
    """Trains `num_learners` replicas of a model on one device, kept together by an averaging rule.

    Args:
        model: `() -> nn.Module`.
        train_data, test_data, validation_data: a map-style data set, or tensors (inputs [N, ...], targets [N]).
            With validation data, it feeds stops and the best accuracy, and test is measured once, at the end.
        num_classes: checked against the model's output when the loss is cross-entropy.
        optimizer, schedule, averaging: what a learner does, how its rate moves, what keeps learners together.
        loss: `f(outputs [B, ...], targets [B, ...])`, a batch mean; default cross-entropy.
        metrics: further means to evaluate, by name.
        augmentation, mean, std: for uint8 image tensors.
        output_dir: where the run is recorded; nothing is written to disk without it.
        resume: a run folder, its checkpoints folder, or one checkpoint to go on from.
        init_from: safetensors to start from (fine-tuning).
        callbacks: listeners, called from the training loop's thread.
        names: how the model and the data are called in records.
        max_evaluation_batches: look at no more than that many batches in an evaluation.
        notes: sentences the listeners are told when training starts.
        trace: write a timeline of tasks to trace.json in `output_dir`, which must be given.
        distributed: what a run over several ranks can be told.
        ranks: of `joined()`, with which one script under torchrun trains on all devices; every rank calls the same. The
            first one writes to disk. Data sets and settings must be alike; samples are shared out.
        batch_size: samples a learner takes per round.
        num_learners: K, replicas trained side by side; `auto` finds the fastest number, up to `max_learners`.
        executor, device, precision, channels_last, compile_model, seed, on_nonfinite, num_workers: see `RunSettings`.
            On CPU with several learners the process is told to keep freed memory, in huge pages
            (`engine.memory.keep_freed_memory`).

    Raises:
        UserError: settings, data and model do not fit each other.
    """

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
        distributed: DistributedSettings = DistributedSettings(),
        ranks: Ranks = ALONE,
        batch_size: int = 16,
        num_learners: int | Literal["auto"] = "auto",
        max_learners: int = 8,
        executor: Literal["auto", "serial", "threads", "fused", "subarrays2", "subarrays4", "streams"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        precision: PrecisionName = "auto",
        channels_last: bool = True,
        compile_model: bool = False,
        seed: int = 0,
        on_nonfinite: Literal["stop", "reseed"] = "stop",
        num_workers: int | Literal["auto"] = "auto",
    ) -> None:
        begun = time.monotonic()
        settings = RunSettings(batch_size, num_learners, max_learners, executor, device, precision, channels_last,
                               compile_model, seed, on_nonfinite, num_workers)  # fmt: skip
        _check(settings, optimizer, schedule, averaging, loss, max_evaluation_batches, ranks)
        self.callbacks = callbacks
        found, self._messages = _saved_run(resume, ranks)
        data = DataSets(train_data, test_data, validation_data, num_classes, augmentation, mean, std)
        choices = _choose(settings, found, ranks)
        parts = build_parts(
            model, data, settings, choices, optimizer=optimizer, rule=averaging, loss=loss, metrics=metrics or {},
            init_from=None if init_from is None or found else str(init_from), announce=self._announce,
            max_evaluation_batches=max_evaluation_batches, timeline=_timeline(trace, output_dir), ranks=ranks,
        )  # fmt: skip
        self._messages += [*notes, *parts.warnings]
        self.run = Run(
            parts, data, settings, schedule, checkpoint, _path(output_dir), experiment, _named(model, names),
            str(found.folder) if found else None, distributed,
        )  # fmt: skip
        _make_ready(self.run, found)
        self.run.state.wall_s += time.monotonic() - begun

    @property
    def state(self) -> RunState:
        """Where training stands."""
        return self.run.state

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
    ) -> Result:
        """Train until the first stop condition is met; a second call goes on where the first ended.

        Args:
            max_epochs, max_samples, max_time_s, target_accuracy, target_loss: see `StopConditions`.
            max_rounds: a stop counted in rounds of this call.
            handle_signals: on SIGTERM and Ctrl-C write a checkpoint and return with status terminated or interrupted.

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
        with TrainingLoop(self.run, stops, listeners) as loop, StopSignal(handle_signals) as signals:
            loop.start(self._messages)
            self._messages = []
            status, reason = loop.run(signals)
            return loop.finish(status, reason)

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
        """Restart the learners from the average model, between two calls of `fit`; see `SMA.restart_momentum`."""
        ranks = self.run.parts.ranks
        self.run.parts.bank.restart(self.run.parts.rule.restart_momentum, ranks.add if ranks.num_ranks > 1 else None)

    def _announce(self, message: str) -> None:
        for listener in self.callbacks:
            listener.on_message(message)

    def _file_listeners(self) -> list[Listener]:
        folder, begun = self.run.output_dir, self.state.round_index > 0
        if folder is None:
            return []
        if not begun and holds_run(folder):
            raise UserError(
                f"output_dir {folder} already holds a run; give resume={folder} to continue it, or another folder."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            uuids = device_uuids(self.run.parts.choices.device)
            listeners = file_listeners(folder, self.state.samples_seen if begun else None, uuids)
        except OSError as error:
            raise UserError(f"output_dir {folder} cannot be written ({error}); choose another folder.") from error
        timeline = self.run.parts.timeline
        return listeners if timeline is None else [*listeners, TimelineFile(timeline, folder)]


def _choose(settings: RunSettings, found: SavedCheckpoint | None, ranks: Ranks) -> Choices:
    """What `auto` becomes on each rank, as the checkpoint says where there is one; an error of one is that of all."""
    with ranks.together():
        if found is None:
            return choose(settings, None, ranks.num_ranks)
        with taking_from(found.folder):
            return choose(settings, found.part(0)["choices"], ranks.num_ranks)


def _named(model: MakeModel, names: Mapping[str, str] | None) -> dict[str, str]:
    """How the model and the data are called in records."""
    return {"model": getattr(model, "__name__", type(model).__name__), "data": "custom", **(names or {})}


def _make_ready(run: Run, found: SavedCheckpoint | None) -> None:
    """Tuning as far as it is asked for, and where the checkpoint stood. All ranks together."""
    ranks = run.parts.ranks
    run.tuning = learner_tuning(run.settings.num_learners, run.parts.most_learners)
    run.supply = worker_supply(run.settings.num_workers, run.parts.train_feed, ranks.num_local)
    with ranks.together():
        if found:
            run.restore(found)


def _check(
    settings: RunSettings,
    optimizer: Optimizer,
    schedule: Schedule,
    averaging: AveragingRule,
    loss: Loss,
    max_evaluation_batches: int | None,
    ranks: Ranks,
) -> None:
    """Refuse what does not fit each other, on all ranks alike."""
    with ranks.together():
        _check_groups(optimizer, schedule, averaging, loss)
        _check_policies(settings, optimizer, averaging, max_evaluation_batches, ranks)
        _check_ranks(settings, averaging, ranks)


def _check_groups(optimizer: Any, schedule: Any, averaging: Any, loss: Any) -> None:
    for name, value, base, example in (
        ("optimizer", optimizer, Optimizer, "SGD()"),
        ("schedule", schedule, Schedule, "Constant()"),
        ("averaging", averaging, AveragingRule, "SMA()"),
    ):
        if not isinstance(value, base):
            raise UserError(f"{name} must be one of crossbow_py's, such as {example}, got {value!r}.")
    if not callable(loss):
        raise UserError(f"loss must be a function (outputs, targets) -> tensor, such as nn.MSELoss(), got {loss!r}.")


def _check_policies(
    settings: RunSettings, optimizer: Optimizer, rule: AveragingRule, max_evaluation_batches: int | None, ranks: Ranks
) -> None:
    optimizer.check_learners(settings.num_learners)
    if settings.num_learners == "auto" and not rule.has_central_model:
        raise UserError(f"averaging={rule.NAME} trains num_learners models, got auto; set how many: num_learners=4.")
    if max_evaluation_batches is not None and max_evaluation_batches < 1:
        raise UserError(f"max_evaluation_batches must be at least 1 or None, got {max_evaluation_batches}.")
    several = settings.several or ranks.num_ranks > 1
    if settings.on_nonfinite == "reseed" and not (rule.has_central_model and several):
        raise UserError(
            f"on_nonfinite=reseed clones the average model, and averaging={rule.NAME} with "
            f"num_learners={settings.num_learners} has none; set on_nonfinite=stop."
        )


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _timeline(trace: bool, output_dir: str | Path | None) -> Timeline | None:
    if trace and output_dir is None:
        raise UserError("trace writes trace.json into the run's folder, got no output_dir; set one, or trace=false.")
    return Timeline() if trace else None


def _saved_run(resume: str | Path | None, ranks: Ranks) -> tuple[SavedCheckpoint | None, list[str]]:
    """The checkpoint the first rank finds whole, and what is to be said of others."""
    if resume is None:
        return None, []

    def find() -> str:
        found, problems = find_newest(Path(resume))
        return json.dumps([str(found.folder), problems])

    folder, problems = json.loads(ranks.from_first(find))
    with ranks.together():
        found = open_checkpoint(Path(folder))
    return found, problems


def _check_ranks(settings: RunSettings, rule: AveragingRule, ranks: Ranks) -> None:
    if ranks.num_ranks > 1 and not rule.has_central_model:
        raise UserError(
            f"averaging={rule.NAME} trains models that never meet, on one device, got {ranks.num_ranks} ranks; start "
            "it without torchrun, once for each device."
        )
    per_node = ranks.num_ranks // ranks.num_nodes * settings.first_learners
    if rule.node_period > 1 and ranks.num_nodes > 1 and per_node == 1:
        raise UserError(
            f"averaging.node_period={rule.node_period} keeps an average model in each node, which needs two learners "
            "there, got one; set num_learners=2 or averaging.node_period=1."
        )
