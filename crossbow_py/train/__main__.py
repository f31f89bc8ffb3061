"""`python -m crossbow_py.train`: train as configured on the command line. `--help` explains the keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from typing import Any

from torch import nn

from crossbow_py.cli.command_line import run
from crossbow_py.core.errors import UserError
from crossbow_py.core.signals import StopSignal
from crossbow_py.data.sources import DataSource
from crossbow_py.data.sources.custom import Custom
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.rank_agreement import check_ranks_agree
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.models import CustomModel
from crossbow_py.telemetry.console import CONSOLE_LOG, ConsoleListener
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD, listeners_of, loggers_of
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.config import TrainConfig, config_to_mapping
from crossbow_py.train.evaluation.metrics import metrics_of
from crossbow_py.train.run_folder.folder import RunFolder, open_run
from crossbow_py.train.run_folder.recorded_config import composed
from crossbow_py.train.run_settings import RunOptions, RunSettings, StopConditions
from crossbow_py.train.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, TrainConfig, train, composed)


def train(config: TrainConfig) -> int:
    """Train one run in its own folder, over all ranks that were launched; returns its exit code."""
    with joined(config.distributed, config.device) as ranks:
        check_ranks_agree(config_to_mapping(config), ranks)
        with open_run(config, ranks) as folder, ExitStack() as stack:
            listeners: list[Listener] = []
            if ranks.is_first:
                listeners = [stack.enter_context(closing(ConsoleListener(folder.path / CONSOLE_LOG)))]
            with ranks.together():
                if ranks.is_first:
                    listeners += [*loggers_of(config.logger), *listeners_of(config.listeners)]
            trainer = build_trainer(config, folder, listeners, ranks)
            result = trainer.fit(**stops(config), counts_earlier_rounds=True, handle_signals=True)
    return StopSignal.EXIT_CODES.get(result.status, 0)


def build_trainer(
    config: TrainConfig, folder: RunFolder | None, callbacks: Sequence[Listener] = (), ranks: Ranks = ALONE
) -> Trainer:
    """Load the data, downloading them where needed, and make the trainer of one run. Raises UserError.

    Without a folder it writes nothing.
    """
    source = _load(config, ranks)

    def make_model() -> nn.Module:
        # A custom model decides the width of its output, which is checked against the data later.
        if source.num_classes is None and not isinstance(config.model, CustomModel):
            if isinstance(config.data, Custom):
                raise UserError(
                    f"model={config.model.NAME} classifies, but nothing tells how many classes "
                    f"data.target={config.data.target} has; set data.num_classes, or use model=custom if its targets "
                    "are not classes."
                )
            raise UserError(
                f"model={config.model.NAME} classifies, but the targets of data={source.name} are not classes; "
                "use integer targets, or model=custom."
            )
        module: nn.Module = config.model.make(source.input_shape, source.num_classes or 0)
        return module

    shared = [field.name for options in (RunOptions, RunSettings) for field in fields(options)]
    return Trainer(
        **{name: getattr(config, name) for name in shared},
        model=make_model,
        train_data=source.train,
        test_data=source.test,
        validation_data=source.validation,
        num_classes=source.num_classes,
        optimizer=config.optimizer,
        schedule=config.schedule,
        metrics=metrics_of(config.metrics),
        averaging=config.averaging,
        augmentation=source.augmentation,
        mean=source.mean,
        std=source.std,
        class_names=source.class_names,
        output_dir=None if folder is None else folder.path,
        resume=None if folder is None else folder.resume,
        checkpoint=CheckpointSettings(
            every_epochs=config.checkpoint_every_epochs,
            every_s=config.checkpoint_every_s,
            keep=config.keep_checkpoints,
        ),
        callbacks=callbacks,
        tensorboard=TENSORBOARD in config.logger,
        notes=[*([folder.note] if folder and folder.note else []), *source.notes],
        experiment=config.experiment,
        init_from=config.init_from,
        names={"model": getattr(config.model, "target", config.model.NAME), "data": source.name},
        ranks=ranks,
    )


def _load(config: TrainConfig, ranks: Ranks) -> DataSource:
    """Load the data. One rank of each host goes first, so that they are downloaded once."""
    source: DataSource | None = None
    for turn in (True, False):
        with ranks.together():
            if (ranks.local_rank == 0) is turn:
                source = config.data.load(progress=turn and ranks.is_first and sys.stderr.isatty())
    assert source is not None, "every rank loads in one of the two turns"
    return source


def stops(config: TrainConfig) -> dict[str, Any]:
    """Return the keyword arguments of `Trainer.fit` that end the run."""
    return {field.name: getattr(config, field.name) for field in fields(StopConditions)}


if __name__ == "__main__":
    raise SystemExit(main())
