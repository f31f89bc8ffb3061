"""`python -m crossbow_py.search`: search as configured on the command line. `--help` explains the keys."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack, closing

from crossbow_py.cli.command_line import run
from crossbow_py.core.errors import SearchError, UserError
from crossbow_py.core.signals import StopSignal
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import kept_unless_refused, open_search_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, SearchConfig, search)


def search(config: SearchConfig) -> int:
    """One worker of a search; returns its exit code. Raises SearchError when every trial has failed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("a search needs Optuna, which is not installed; run pip install optuna.")
    from crossbow_py.search.build import SearchRun  # noqa: PLC0415
    from crossbow_py.search.report.listeners import search_listeners  # noqa: PLC0415  as Optuna is optional

    folder = open_search_folder(config)
    try:
        with kept_unless_refused(folder), ExitStack() as stack:
            listeners = [stack.enter_context(closing(each)) for each in search_listeners(folder.path, config.logger)]
            one = stack.enter_context(closing(SearchRun(config, folder, listeners)))
            signals = stack.enter_context(StopSignal(enabled=True))  # before it, there is nothing to finish
            summary = one.run(lambda: signals.status)
    except KeyboardInterrupt as interrupt:  # a second Ctrl-C: nothing else is said
        again = "the same command" if config.resume else "the same command with resume=auto"
        interrupt.add_note(f"{again} goes on in {folder.path}, where every finished rung is kept")
        raise
    if summary.status == "finished" and summary.best is None:
        number, first = len(summary.trials), next(trial for trial in summary.trials if trial.reason)
        reason = (first.reason or "").rstrip(".")
        raise SearchError(f"every trial failed, {number} of {number}; trial {first.trial}: {reason}.")
    return StopSignal.EXIT_CODES.get(summary.status, 0)


if __name__ == "__main__":
    raise SystemExit(main())
