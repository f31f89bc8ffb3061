"""A run: its parts, its settings and where it stands; what makes two runs the same, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py import checkpoint
from crossbow_py.assembly import DataSets, Parts
from crossbow_py.checkpoint import CheckpointSettings, differences
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.errors import CheckpointError, UserError
from crossbow_py.evaluation import Evaluation
from crossbow_py.run_settings import RunSettings
from crossbow_py.run_state import RunState
from crossbow_py.schedules import Schedule
from crossbow_py.settings import to_mapping
from crossbow_py.supply import WorkerSupply
from crossbow_py.tuning import LearnerTuning
from crossbow_py.weights_file import save_weights

# Settings that do not decide what comes out, or are kept with what `auto` chose.
_CHANGEABLE = ("device", "executor", "compile_model", "precision", "on_nonfinite", "max_learners", "num_workers")


@dataclass
class Run:
    """Everything the training loop works on; made by the trainer, kept over several calls of `fit`."""

    parts: Parts
    data: DataSets
    settings: RunSettings
    schedule: Schedule
    checkpoints: CheckpointSettings
    output_dir: Path | None
    experiment: str
    names: dict[str, str]
    resumed_from: str | None
    state: RunState = field(default_factory=RunState)
    tuning: LearnerTuning | None = None
    supply: WorkerSupply | None = None

    @property
    def samples_per_round(self) -> int:
        """How far a round moves the cursor in the sample stream: independent learners all take the same batch."""
        return self.settings.batch_size * (self.parts.bank.num_learners if self.parts.rule.has_central_model else 1)

    @property
    def num_samples(self) -> int:
        """N, the samples of an epoch."""
        return self.parts.train_feed.num_samples

    def evaluate(self, which: str) -> tuple[Evaluation, tuple[Evaluation, ...]] | None:
        """Measure on the `test` or `validation` data; None without. See `Parts.evaluate`."""
        feed = self.parts.test_feed if which == "test" else self.parts.validation_feed
        if feed is None:
            return None
        return self.parts.evaluate(feed, self.state.samples_seen, list(self.state.sick_learners))

    def models(self) -> list[nn.Module]:
        """The average model, or every independent learner, in master precision and evaluation mode."""
        states = self.parts.final_states(self.state.samples_seen, list(self.state.sick_learners))
        return [self.parts.evaluator.module(state) for state in states]

    def save_models(self, models: Sequence[nn.Module]) -> str | None:
        """Write them as safetensors into the run's folder, if it has one. Returns what to tell the user.

        Raises UserError when they cannot be written.
        """
        if self.output_dir is None:
            return None
        single = self.parts.rule.has_central_model
        names = ["model.safetensors"] if single else [f"model_{j}.safetensors" for j in range(len(models))]
        for name, module in zip(names, models, strict=True):
            try:
                save_weights(module, self.output_dir / name)
            except OSError as error:
                raise UserError(
                    f"cannot write {self.output_dir / name} ({error}); make room there and resume the run."
                ) from error
        return str(self.output_dir / names[0]) if single else str(self.output_dir)

    def newest_checkpoint(self) -> str | None:
        """Its folder."""
        found = checkpoint.checkpoints(self.output_dir) if self.output_dir else []
        return str(found[0]) if found else None

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds: tensors and plain types. The executor must be drained."""
        if self.parts.bank.num_learners == 1:
            self.parts.bank.adopt_learner()  # z is w
        return {
            "choices": self.parts.choices.to_plain(),
            "identity": self.identity(),
            "state": self.state.to_plain(),
            "bank": self.parts.bank.state_dict(),
            "tuner": self.tuning.to_plain() if self.tuning else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises CheckpointError when it is of another run."""
        changed = differences(saved["identity"], self.identity())
        if changed:
            shown = "; ".join(changed[:4]) + ("; ..." if len(changed) > 4 else "")
            raise CheckpointError(
                f"checkpoint {self.resumed_from} is of another run ({shown}); resuming may change only stops, logging "
                "and paths: use the same settings, or start afresh without resume."
            )
        self.parts.bank.load_state_dict(saved["bank"])
        self.state = RunState.from_plain(saved["state"])
        if self.tuning and saved.get("tuner"):
            self.tuning.restore(saved["tuner"])
            self.parts.bank.resize(self.tuning.state.num_learners)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to go on: everything but stops, logging and paths."""
        settings = to_mapping(self.settings)
        for changeable in _CHANGEABLE:
            settings.pop(changeable)
        parts = self.parts
        groups: dict[str, Any] = {"optimizer": parts.optimizer, "schedule": self.schedule, "averaging": parts.rule}
        return {
            **settings,
            "precision": parts.choices.precision.name,
            **{group: {"name": chosen.NAME, **to_mapping(chosen)} for group, chosen in groups.items()},
            "data": {
                "augmentation": to_mapping(self.data.augmentation or Augmentation()),
                "mean": list(self.data.mean or ()),
                "std": list(self.data.std or ()),
            },
            "model": {
                block.name: list(block.shape)
                for layout in (parts.bank.layout, parts.bank.buffer_layout)
                for block in layout.blocks
            },
            "num_train_samples": self.num_samples,
        }
