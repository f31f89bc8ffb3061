"""`python -m crossbow_py.train`: train as configured on the command line. `--help` explains the keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from crossbow_py.cli.command_line import run
from crossbow_py.core.signals import StopSignal
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.rank_agreement import check_alike
from crossbow_py.telemetry.console import CONSOLE_LOG, ConsoleListener
from crossbow_py.telemetry.events import Listener
from crossbow_py.train.config import TrainConfig, config_to_mapping
from crossbow_py.train.from_config import build_trainer, stops
from crossbow_py.train.run_folder.folder import open_run
from crossbow_py.train.run_folder.recorded_config import composed


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, TrainConfig, train, composed)


def train(config: TrainConfig) -> int:
    """One run in its own folder, over all ranks that were launched; returns its exit code."""
    with joined(config.distributed, config.device) as ranks:
        check_alike(config_to_mapping(config), ranks)
        with open_run(config, ranks) as folder, ExitStack() as stack:
            listeners: list[Listener] = []
            if ranks.is_first:
                listeners = [stack.enter_context(closing(ConsoleListener(folder.path / CONSOLE_LOG)))]
            trainer = build_trainer(config, folder, listeners, ranks)
            result = trainer.fit(**stops(config), handle_signals=True)
    return StopSignal.EXIT_CODES.get(result.status, 0)


if __name__ == "__main__":
    raise SystemExit(main())
