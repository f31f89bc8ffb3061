"""From the command line's configuration to a Trainer: the only place where one's keys become the other's arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources import DataSource
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.models import CustomModel
from crossbow_py.telemetry.events import Listener
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.run_folder.folder import RunFolder
from crossbow_py.train.trainer import Trainer


def build_trainer(
    config: TrainConfig, folder: RunFolder, callbacks: Sequence[Listener] = (), ranks: Ranks = ALONE
) -> Trainer:
    """Load (where needed download) the data and make the trainer of one run. Raises UserError for what cannot work."""
    source = _load(config, ranks)

    def make_model() -> nn.Module:
        module: nn.Module = config.model.build(source.input_shape, _num_classes(config, source))
        return module

    return Trainer(
        model=make_model,
        train_data=source.train,
        test_data=source.test,
        validation_data=source.validation,
        num_classes=source.num_classes,
        optimizer=config.optimizer,
        schedule=config.schedule,
        averaging=config.averaging,
        augmentation=source.augmentation,
        mean=source.mean,
        std=source.std,
        class_names=source.class_names,
        output_dir=folder.path,
        resume=folder.resume,
        init_from=config.init_from,
        checkpoint=CheckpointSettings(
            every_epochs=config.checkpoint_every_epochs,
            every_s=config.checkpoint_every_s,
            keep=config.keep_checkpoints,
        ),
        callbacks=callbacks,
        notes=[*([folder.note] if folder.note else []), *source.notes],
        experiment=config.experiment,
        names={"model": getattr(config.model, "target", config.model.NAME), "data": source.name},
        trace=config.trace,
        profile=config.profile,
        max_evaluation_batches=config.max_evaluation_batches,
        batch_size=config.batch_size,
        num_learners=config.num_learners,
        max_learners=config.max_learners,
        executor=config.executor,
        device=config.device,
        precision=config.precision,
        channels_last=config.channels_last,
        compile_model=config.compile_model,
        seed=config.seed,
        on_nonfinite=config.on_nonfinite,
        num_workers=config.num_workers,
        order_seed=config.order_seed,
        label_smoothing=config.label_smoothing,
        learning_statistics=config.learning_statistics,
        distributed=config.distributed,
        ranks=ranks,
    )


def _load(config: TrainConfig, ranks: Ranks) -> DataSource:
    """The data; where there are several ranks one of each host loads first, so that it is downloaded once."""
    source: DataSource | None = None
    for turn in (True, False):
        with ranks.together():
            if (ranks.local_rank == 0) is turn:
                source = config.data.load(progress=turn and ranks.is_first and sys.stderr.isatty())
    assert source is not None, "every rank has its turn"
    return source


def stops(config: TrainConfig) -> dict[str, Any]:
    """What ends the run: the keyword arguments of `Trainer.fit`."""
    names = ("max_epochs", "max_samples", "max_rounds", "max_time_s", "target_accuracy", "target_loss")
    return {name: getattr(config, name) for name in names}


def _num_classes(config: TrainConfig, source: DataSource) -> int:
    """Width of the model's output. A custom model decides that itself and is checked against the data later."""
    if source.num_classes is None and not isinstance(config.model, CustomModel):
        raise UserError(
            f"model={config.model.NAME} classifies, and the targets of data={source.name} are no classes; "
            "use integer targets, or model=custom."
        )
    return source.num_classes or 0
