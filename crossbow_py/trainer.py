"""The trainer: what a run is made of, what makes two runs the same, and `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.assembly import DataSets, RunSettings, build_parts, choose
from crossbow_py.averaging import SMA, AveragingRule
from crossbow_py.checkpoint import CheckpointSettings, differences, load_newest
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data
from crossbow_py.engine.optimizers import SGD, Optimizer
from crossbow_py.engine.rounds import Loss
from crossbow_py.errors import CheckpointError, UserError
from crossbow_py.evaluation import Evaluation, Metric
from crossbow_py.run_state import RunState
from crossbow_py.schedules import Constant, Schedule
from crossbow_py.settings import from_mapping, to_mapping
from crossbow_py.signals import StopSignal
from crossbow_py.stopping import StopConditions
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.records import file_listeners
from crossbow_py.training_loop import Result, TrainingLoop, evaluate_parts


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
        settings: batch_size, num_learners, executor, device, precision, channels_last, seed, on_nonfinite.

    Raises:
        UserError: settings, data and model do not fit each other.
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
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
        **settings: Any,
    ) -> None:
        self.settings = from_mapping(RunSettings, settings)
        self.optimizer, self.schedule, self.rule = optimizer, schedule, averaging
        self.data = DataSets(train_data, test_data, validation_data, num_classes, augmentation, mean, std)
        self.checkpoint_settings, self.experiment, self.callbacks = checkpoint, experiment, callbacks
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.names = {"model": getattr(model, "__name__", type(model).__name__), "data": "custom", **(names or {})}
        self._check_policies(max_evaluation_batches)
        saved, self.resumed_from, self._messages = _saved_run(resume)
        self.parts = build_parts(
            model,
            self.data,
            self.settings,
            choose(self.settings, saved["choices"] if saved else None),
            optimizer=optimizer,
            rule=averaging,
            loss=loss,
            metrics=metrics or {},
            init_from=None if init_from is None or saved else str(init_from),
            max_evaluation_batches=max_evaluation_batches,
        )
        self._messages += self.parts.warnings
        self.state = RunState()
        if saved:
            self._restore(saved)

    def _check_policies(self, max_evaluation_batches: int | None) -> None:
        for name, value, base, example in (
            ("optimizer", self.optimizer, Optimizer, "SGD()"),
            ("schedule", self.schedule, Schedule, "Constant()"),
            ("averaging", self.rule, AveragingRule, "SMA()"),
        ):
            if not isinstance(value, base):
                raise UserError(f"{name} must be one of crossbow_py's, such as {example}, got {value!r}.")
        self.optimizer.check_learners(self.settings.num_learners)
        if max_evaluation_batches is not None and max_evaluation_batches < 1:
            raise UserError(f"max_evaluation_batches must be at least 1 or None, got {max_evaluation_batches}.")
        together = self.rule.has_central_model and self.settings.num_learners > 1
        if self.settings.on_nonfinite == "reseed" and not together:
            raise UserError(
                f"on_nonfinite=reseed clones the average model, and averaging={self.rule.NAME} with "
                f"num_learners={self.settings.num_learners} has none; set on_nonfinite=stop."
            )

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
        if max_rounds is not None:
            if max_rounds < 1:
                raise UserError(f"max_rounds must be at least 1, got {max_rounds}.")
            limit = self.state.samples_seen + max_rounds * self.samples_per_round
            max_samples = limit if max_samples is None else min(max_samples, limit)
        stops = StopConditions(max_epochs, max_samples, max_time_s, target_accuracy, target_loss)
        resumed_samples = self.state.samples_seen if self.state.round_index else None
        files = _file_listeners(self.output_dir, resumed_samples) if self.output_dir else []
        with TrainingLoop(self, stops, [*files, *self.callbacks]) as loop, StopSignal(handle_signals) as signals:
            self._messages = loop.start(self._messages)
            status, reason = loop.run(signals)
            return loop.finish(status, reason)

    def evaluate(self) -> Evaluation:
        """Measure the current model (independent learners: their mean) on the test data. Raises UserError without."""
        if self.parts.test_feed is None:
            raise UserError("evaluate() needs test_data, got none; give Trainer(test_data=...).")
        return evaluate_parts(self.parts, self.parts.test_feed, self.state.samples_seen)[0]

    @property
    def samples_per_round(self) -> int:
        """How far a round moves the cursor in the sample stream: independent learners all take the same batch."""
        return self.settings.batch_size * (self.settings.num_learners if self.rule.has_central_model else 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds: tensors and plain types."""
        choices = self.parts.choices
        return {
            "choices": {"precision": choices.precision.name, "executor": choices.executor},
            "identity": self._identity(),
            "state": self.state.to_plain(),
            "bank": self.parts.bank.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a run to go on: everything but stops, logging and paths."""
        settings = to_mapping(self.settings)
        for changeable in ("device", "executor", "precision", "on_nonfinite"):
            settings.pop(changeable)
        return {
            **settings,
            "precision": self.parts.choices.precision.name,
            "optimizer": {"name": self.optimizer.NAME, **to_mapping(self.optimizer)},
            "schedule": {"name": self.schedule.NAME, **to_mapping(self.schedule)},
            "averaging": {"name": self.rule.NAME, **to_mapping(self.rule)},
            "data": {
                "augmentation": to_mapping(self.data.augmentation or Augmentation()),
                "mean": list(self.data.mean or ()),
                "std": list(self.data.std or ()),
            },
            "model": {
                block.name: list(block.shape)
                for layout in (self.parts.bank.layout, self.parts.bank.buffer_layout)
                for block in layout.blocks
            },
            "num_train_samples": self.parts.train_feed.num_samples,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        changed = differences(saved["identity"], self._identity())
        if changed:
            shown = "; ".join(changed[:4]) + ("; ..." if len(changed) > 4 else "")
            raise CheckpointError(
                f"checkpoint {self.resumed_from} is of another run ({shown}); resuming may change only stops, logging "
                "and paths: use the same settings, or start afresh without resume."
            )
        self.parts.bank.load_state_dict(saved["bank"])
        self.state = RunState.from_plain(saved["state"])


def _file_listeners(output_dir: Path, resumed_samples: int | None) -> list[Listener]:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        return file_listeners(output_dir, resumed_samples)
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be written ({error}); choose another folder.") from error


def _saved_run(resume: str | Path | None) -> tuple[dict[str, Any] | None, str | None, list[str]]:
    if resume is None:
        return None, None, []
    saved, folder, problems = load_newest(Path(resume))
    return saved, str(folder), problems
