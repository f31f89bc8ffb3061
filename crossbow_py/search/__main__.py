"""`python -m crossbow_py.search`: search as configured on the command line. `--help` explains the keys."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack

from crossbow_py.cli.command_line import run
from crossbow_py.cli.launchers.placement import RayLauncher
from crossbow_py.core.errors import UserError
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.rank_agreement import check_ranks_agree
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import opened_folder
from crossbow_py.train.config import config_to_mapping


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, SearchConfig, search, placed=search_elsewhere)


def search(config: SearchConfig) -> int:
    """One worker of a search, or all that torchrun has started, each on its device; returns its exit code.

    Ranks agree on where they search, and leave their process group before they do: what they share from then on is
    the storage alone, so that none waits for another. Raises SearchError when every trial has failed.
    """
    check_optuna()
    from crossbow_py.search.searcher import prepared, search_to_the_end  # noqa: PLC0415  as Optuna is optional

    with ExitStack() as stack:
        with joined(device=config.device) as ranks:
            check_ranks_agree(config_to_mapping(config), ranks)
            folder = stack.enter_context(opened_folder(config, ranks))
            worker = stack.enter_context(prepared(config, folder, ranks))
        return search_to_the_end(worker, ranks)


def search_elsewhere(config: SearchConfig, launcher: RayLauncher, words: Sequence[str]) -> int:
    """Start workers of a search by a launcher, each with these words, and wait for them; returns the exit code."""
    check_optuna()
    from crossbow_py.search.placed import search_on_ray  # noqa: PLC0415  likewise

    return search_on_ray(config, launcher, words)


def check_optuna() -> None:
    """Raise UserError if Optuna is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("a search needs Optuna, which is not installed; run pip install optuna.")


if __name__ == "__main__":
    raise SystemExit(main())
