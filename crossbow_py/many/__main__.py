"""`python -m crossbow_py.many`: train many models side by side. `--help` explains the keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path

from crossbow_py.cli.command_line import run
from crossbow_py.cli.config_files import write_yaml
from crossbow_py.cli.output_folder import make_folder, new_folder
from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.files import given_path
from crossbow_py.core.signals import StopSignal
from crossbow_py.many.config import ManyConfig, without_unused
from crossbow_py.many.report import ManyConsole, write_records
from crossbow_py.many.train_many import ManyArguments, ManyRun
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.records import CONFIG_FILE, write_atomically
from crossbow_py.telemetry.screen import Screen
from crossbow_py.train.checkpoints.checkpoint import holds_run
from crossbow_py.train.config import config_to_mapping, first_model
from crossbow_py.train.evaluation.metrics import metrics_of
from crossbow_py.train.run_settings import JobSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, ManyConfig, train, settled=without_unused)


def train(config: ManyConfig) -> int:
    """Train the members of one study in its folder; returns the exit code."""
    folder = _folder(config)
    with closing(ManyConsole(Screen(folder / CONSOLE_LOG))) as console:
        source = config.data.load(progress=sys.stderr.isatty())
        shared = {each.name: getattr(config, each.name) for each in fields(JobSettings)}
        arguments = ManyArguments(
            model=partial(first_model, config.model, source.input_shape, source.num_classes, config.init_from),
            train_data=source.train,
            test_data=source.test,
            validation_data=source.validation,
            **shared,
            members=config.all_members(source),
            num_classes=source.num_classes,
            max_epochs=config.max_epochs or 0.0,
            max_rounds=config.max_rounds,
            optimizer=config.optimizer,
            schedule=config.schedule,
            metrics=metrics_of(config.metrics),
            augmentation=source.augmentation,
            mean=source.mean,
            std=source.std,
            patience=config.patience,
            restore_best=config.restore_best,
            evaluations_per_epoch=config.evaluations_per_epoch,
            max_pack_size=config.max_pack_size,
            output_dir=folder,
            checkpoint_every_s=config.checkpoint_every_s,
            progress=console.on_progress,
            message=console.on_message,
        )
        with ManyRun(arguments) as study:
            console.on_start(config.experiment, source, study)
            results = study.train()
            console.on_end(results, write_records(results, folder, config.logger))
    return StopSignal.EXIT_CODES.get(study.status or "", 0)


def _folder(config: ManyConfig) -> Path:
    """Return the folder, with the configuration in it. Raises UserError."""
    if config.output_dir is None:
        path = new_folder(config.experiment)
    else:
        path = make_folder(given_path("output_dir", config.output_dir))
        if holds_run(path):
            raise UserError(f"output_dir {path} holds a run; choose another folder.")
    try:
        write_atomically(path / CONFIG_FILE, write_yaml(config_to_mapping(config)))
    except OSError as error:
        raise unwritable(path, error) from error
    return path


if __name__ == "__main__":
    raise SystemExit(main())
