"""A run: its parts, its settings and where it stands; what makes two runs the same, and what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from crossbow_py.core.errors import CentralModelError, CheckpointError, UserError
from crossbow_py.core.plain_values import differences, filled
from crossbow_py.core.settings import to_mapping
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.distributed.synchronisation import differing
from crossbow_py.engine.bank.replicas import CENTRAL, mean_weights, num_saved
from crossbow_py.engine.update.outer_step import mean_of_learners
from crossbow_py.train.build import DataSets
from crossbow_py.train.checkpoints import checkpoint
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings, SavedCheckpoint, formerly, taking_from
from crossbow_py.train.checkpoints.weights import MODEL_FILE, save_weights
from crossbow_py.train.components import Parts
from crossbow_py.train.evaluation.evaluator import Evaluation
from crossbow_py.train.run_settings import RunSettings
from crossbow_py.train.run_state import RunState
from crossbow_py.train.schedules import Schedule
from crossbow_py.train.tuning.busy_cores import BusyCores
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from crossbow_py.train.tuning.worker_autotuner import WorkerSupply

# Settings that do not decide what comes out, or are kept with what `auto` chose.
_CHANGEABLE = (
    "device", "executor", "compile_model", "precision", "on_nonfinite", "max_learners", "num_workers",
    "learning_statistics",
)  # fmt: skip


class SavedModels(NamedTuple):
    """Where a run's models are, None for nowhere, and the SHA-256 of each file by its name."""

    path: str | None
    digests: dict[str, str]


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
    distributed: DistributedSettings = DistributedSettings()
    state: RunState = field(default_factory=RunState)
    tuning: LearnerTuning | None = None
    supply: WorkerSupply | None = None
    busy_cores: BusyCores | None = None

    @property
    def samples_per_round(self) -> int:
        """How far a round moves the cursor in the sample stream: independent learners all take the same batch."""
        return self.settings.batch_size * (self.parts.bank.total_learners if self.parts.rule.has_central_model else 1)

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
        """The average model or its EMA, or every independent learner, in master precision and evaluation mode."""
        states = self.parts.final_states(self.state.samples_seen, list(self.state.sick_learners))
        return [self.parts.evaluator.module(state) for state in states]

    def save_models(self, models: Sequence[nn.Module]) -> SavedModels:
        """Write them as safetensors into the run's folder, if it has one; the first rank does, all call it.

        Raises UserError when they cannot be written.
        """
        if self.output_dir is None:
            return SavedModels(None, {})
        digests = dict[str, str]()
        single = self.parts.rule.has_central_model
        names = [MODEL_FILE] if single else [f"model_{j}.safetensors" for j in range(len(models))]
        with self.parts.ranks.together():
            for name, module in zip(names, models, strict=True) if self.parts.ranks.is_first else ():
                try:
                    digests[name] = save_weights(module, self.output_dir / name)
                except OSError as error:
                    raise UserError(
                        f"cannot write {self.output_dir / name} ({error}); make room there and resume the run."
                    ) from error
        return SavedModels(str(self.output_dir / names[0]) if single else str(self.output_dir), digests)

    def newest_checkpoint(self) -> str | None:
        """Its folder."""
        found = checkpoint.checkpoints(self.output_dir) if self.output_dir else []
        return str(found[0]) if found else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: tensors and plain types. Executors must be drained, on all ranks alike.

        The first rank's holds all that is not of learners; z too, unless nodes have one each.
        """
        bank, ranks = self.parts.bank, self.parts.ranks
        if bank.is_single:
            bank.adopt_learner()  # z is w
        own = bank.state_dict()
        if not (ranks.is_first or self.parts.collective.apart):
            for name in CENTRAL:
                own.pop(name, None)
        return {
            "choices": self.parts.choices.to_plain(),
            "identity": self.identity(),
            "state": self.state.to_plain(),
            "epoch_sums": list(self.epoch_sums()),
            "nodes": self.parts.nodes,
            "bank": own,
            "average_ema": self.parts.average_ema.state_dict() if self.parts.average_ema and ranks.is_first else None,
            "tuner": self.tuning.to_plain() if self.tuning else None,
        }

    def epoch_sums(self) -> tuple[float, int, float | None]:
        """The sums of `RunState` over all ranks: losses, their number, right predictions. They call it together."""
        state = self.state
        loss_sum, num_losses, num_correct = self.parts.ranks.sum(
            [state.loss_sum, state.num_losses, math.nan if state.num_correct is None else state.num_correct]
        )
        return loss_sum, int(num_losses), None if math.isnan(num_correct) else num_correct

    def spread(self) -> float | None:
        """Root mean square of |w_j − c| / |c| over the learners of all ranks, which call it together.

        c is z, or by rules that show it the learners' mean. None with one learner, where c is zero, or where all
        learners are sick.
        """
        parts, sick = self.parts, list(self.state.sick_learners)
        if parts.bank.is_single:
            return None
        center = mean_of_learners(parts.bank, parts.collective, sick) if parts.rule.shows_mean else None
        squares = parts.bank.squared_distances(center, sick)
        total, count = parts.ranks.sum([sum(squares), len(squares)])
        return math.sqrt(total / count) if count else None

    def add_up_epoch(self) -> None:
        """The sums of `RunState` become those of all ranks, for the record of an epoch that closes."""
        state = self.state
        state.loss_sum, state.num_losses, state.num_correct = self.epoch_sums()

    def check_z(self) -> None:
        """Compare z over ranks, which must have the same; all together, drained.

        Raises CentralModelError, or RankError where the first rank says it.
        """
        ranks = self.parts.ranks
        if ranks.num_ranks == 1:
            return
        found = ranks.gather([ranks.node if self.parts.collective.apart else 0, self.parts.bank.z_checksum()])
        if odd := differing(found):
            ranks.raise_any(CentralModelError(odd, self.state.round_index) if ranks.is_first else None)

    def restore(self, checkpoint: SavedCheckpoint) -> None:
        """Go on from a checkpoint, whose number of ranks may be another one.

        With as many ranks as it has, every learner is what it was. With another number z is, and so is the schedule;
        learners beyond those that were there are clones of z. Raises CheckpointError when it is of another run.
        """
        with taking_from(checkpoint.folder):
            saved = checkpoint.part(0)
            self._check_identity(saved["identity"])
            if checkpoint.num_ranks == self.parts.ranks.num_ranks:
                self._take_own(checkpoint)
            else:
                self._take_share(checkpoint)
            if self.parts.average_ema is not None:
                self.parts.average_ema.load_state_dict(saved["average_ema"], self.state.samples_seen)
            if self.tuning and saved.get("tuner"):
                self.tuning.restore(saved["tuner"])
                self.parts.bank.resize(self.tuning.state.num_learners)

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        current = self.identity()
        changed = differences(filled(saved, formerly(current)), current)
        if changed:
            shown = "; ".join(changed[:4]) + ("; ..." if len(changed) > 4 else "")
            raise CheckpointError(
                f"checkpoint {self.resumed_from} is of another run ({shown}); resuming may change only stops, logging "
                "and paths: use the same settings, or start afresh without resume."
            )

    def _take_own(self, checkpoint: SavedCheckpoint) -> None:
        """This rank's part. z is its node's where nodes had one each, and ranks are in nodes as they were."""
        own = checkpoint.part(self.parts.ranks.rank)
        nodes = self.parts.nodes
        central = own["bank"] if nodes and nodes == own.get("nodes") else self._central(checkpoint)
        self.parts.bank.load_state_dict({**own["bank"], **{name: central[name] for name in CENTRAL if name in central}})
        self.state = RunState.from_plain(own["state"])

    def _take_share(self, checkpoint: SavedCheckpoint) -> None:
        """Of the learners of another number of ranks, and of the epoch's sums."""
        saved = checkpoint.part(0)
        self.parts.bank.resize(num_saved(saved["bank"]))
        sick = self._spread_out(checkpoint)
        state = RunState.from_plain({**saved["state"], "sick_learners": sick})
        whole = saved.get("epoch_sums", (state.loss_sum, state.num_losses, state.num_correct))
        none = (0.0, 0, None if state.num_correct is None else 0.0)
        state.loss_sum, state.num_losses, state.num_correct = whole if self.parts.ranks.is_first else none
        self.state = state

    def _spread_out(self, checkpoint: SavedCheckpoint) -> dict[int, int]:
        """Deal a checkpoint's learners out to another number of ranks. Returns those of this rank that are sick."""
        bank, sick = self.parts.bank, dict[int, int]()
        num_learners = num_saved(checkpoint.part(0)["bank"])
        bank.load_central(self._central(checkpoint))
        if self.parts.rule.shows_mean:  # z is as old as their last averaging
            parts = [checkpoint.part(rank) for rank in range(checkpoint.num_ranks)]
            ill = [part["state"]["sick_learners"] for part in parts]
            bank.z.load(0, mean_weights([part["bank"] for part in parts], ill))
        # Alike, learners are z with a state that goes on; else each is its own, as long as there are enough.
        mean, goes_on = self.parts.rule.gradient_mean, not bank.replicas_identical
        if bank.replicas_identical and mean is not None:
            goes_on = mean.num_groups(num_learners, checkpoint.num_ranks) == 1
        for row in range(bank.num_learners):
            learner = bank.first_learner + row
            rank, saved_row = divmod(learner % (num_learners * checkpoint.num_ranks), num_learners)
            saved = checkpoint.part(rank)
            there = learner < num_learners * checkpoint.num_ranks or bank.replicas_identical
            (bank.load_row if there and goes_on else bank.clone_learner)(row, saved["bank"], saved_row)
            if (since := saved["state"]["sick_learners"].get(saved_row)) is not None:
                sick[row] = since  # its buffers, at least, are not to be used
        bank.align_groups()
        return sick

    def _central(self, checkpoint: SavedCheckpoint) -> Mapping[str, Any]:
        """Of `CENTRAL` what there is: the first rank's, or their means over ranks where nodes had one each."""
        first = checkpoint.part(0)
        if not first.get("nodes"):
            return first["bank"]  # type: ignore[no-any-return]
        banks = [checkpoint.part(rank)["bank"] for rank in range(checkpoint.num_ranks)]
        return {
            name: {key: sum(bank[name][key] for bank in banks) / len(banks) for key in first["bank"][name]}
            for name in CENTRAL
            if name in first["bank"]
        }

    def remarks(self, total_samples: int | None) -> list[str]:
        """What has to be said of a run of so many samples, where they are known.

        Raises UserError when the rule needs to know them.
        """
        if self.parts.rule.needs_end and total_samples is None:
            raise UserError(
                "averaging.quadratic_period has learners average at the end of the run at the latest, which nothing "
                "says beforehand; set max_epochs or max_samples."
            )
        remarks, ema = [], self.parts.rule.average_ema
        if total_samples is not None:
            epochs = total_samples / self.num_samples
            remarks = [remark] if (remark := self.schedule.remark(epochs)) else []
            if ema is not None and ema >= epochs:
                remarks.append(
                    f"averaging.average_ema={ema:g} is as long as the run of {epochs:g} epochs, or longer: its first "
                    "models count as much as its last; take a shorter one."
                )
        return [*remarks, *self._remarks_on_averaging(total_samples)]

    def _remarks_on_averaging(self, total_samples: int | None) -> list[str]:
        rule, bank = self.parts.rule, self.parts.bank
        rounds = math.inf if total_samples is None else -(-total_samples // self.samples_per_round)
        if bank.is_single or self.tuning:
            return []
        if bank.replicas_identical:
            size = rule.gradient_mean and rule.gradient_mean.group_size
            one_group = (
                f"averaging.group_size={size} puts all {bank.num_learners} learners into one group: they average "
                "gradients, and no models; take a smaller one for several groups."
            )
            return [] if size is None else [one_group]
        if rule.averaging_period > rounds and not rule.shows_mean:
            return [
                f"averaging.averaging_period={rule.averaging_period} is longer than the run of {rounds} rounds: "
                "learners never average, and the average model stays as it began; take a smaller one."
            ]
        if rule.node_period > 1 and not self.parts.collective.apart:
            return [f"averaging.node_period={rule.node_period} is for several nodes; with one it does nothing."]
        if self.parts.collective.apart and rule.averaging_period * rule.node_period > rounds:
            return [
                f"averaging.node_period={rule.node_period} is longer than the run of {rounds} rounds: nodes never "
                "join, and evaluations show the mean of what each learned by itself; take a smaller one."
            ]
        return []

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
