"""`python -m crossbow_py.train`: train as configured on the command line. `--help` explains the keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from crossbow_py.build import build_trainer, stops
from crossbow_py.command_line import EXIT_INTERRUPTED, EXIT_TERMINATED, run
from crossbow_py.config import TrainConfig
from crossbow_py.run_folder import open_run
from crossbow_py.telemetry.console import CONSOLE_LOG, ConsoleListener

_EXIT_CODES = {"terminated": EXIT_TERMINATED, "interrupted": EXIT_INTERRUPTED}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, TrainConfig, train)


def train(config: TrainConfig) -> int:
    """One run in its own folder; returns its exit code."""
    with open_run(config) as folder, closing(ConsoleListener(folder.path / CONSOLE_LOG)) as console:
        trainer = build_trainer(config, folder, [console])
        result = trainer.fit(**stops(config), handle_signals=True)
    return _EXIT_CODES.get(result.status, 0)


if __name__ == "__main__":
    raise SystemExit(main())
