"""One search worker of a host: what it is built with, alone or as one of several ranks, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from crossbow_py.core.errors import CrossbowError, RankError, SearchError
from crossbow_py.core.signals import StopSignal
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.search.build import SearchRun
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import SearchSummary
from crossbow_py.search.folder import SearchFolder, mark_joined, told_how_to_go_on
from crossbow_py.search.report.listeners import search_listeners


@contextmanager
def prepared(config: SearchConfig, folder: SearchFolder, ranks: Ranks = ALONE) -> Iterator[SearchRun]:
    """Build a worker that is ready to search, on the current device and with torch's threads, and close it.

    All ranks call this together. The first of a host loads the data, tries the device and opens the storage before
    the others. Once the block is entered, no rank waits for another.

    Raises UserError, or StorageError when the storage cannot be used; if there are several ranks, on all of them.
    """
    with told_how_to_go_on(config, folder), ExitStack() as stack:
        with ranks.together():  # a service may answer some of them and not others
            every = search_listeners(folder.path, config.logger, speaks=ranks.is_first)
            listeners = [stack.enter_context(closing(each)) for each in every]
        run: SearchRun | None = None
        for turn in (True, False):
            with ranks.together():
                if (ranks.local_rank == 0) is turn:
                    run = stack.enter_context(closing(SearchRun(config, folder, listeners)))
        assert run is not None, "every rank builds in one of the two turns"
        with ranks.together():
            if ranks.num_ranks > 1:
                run.study.join()  # before any of them claims: each takes its share
                if not ranks.is_first:
                    mark_joined(folder)
        yield run


def search_to_the_end(run: SearchRun, ranks: Ranks = ALONE) -> int:
    """Search until nothing is left or a signal comes; returns the exit code. A rank waits for no other meanwhile.

    Raises:
        SearchError: every trial failed.
        CrossbowError: this worker cannot go on; RankError, with its number, if it is one of several ranks.
    """
    try:
        with StopSignal(enabled=True) as signals:  # before it, there is nothing to finish
            summary = run.run(lambda: signals.status)
    except CrossbowError as error:
        if ranks.num_ranks == 1:
            raise
        raise RankError(ranks.rank, str(error), error.exit_code, type(error).__name__, is_said=True) from error
    check_succeeded(summary)  # which all ranks find; the first of a host prints it
    return StopSignal.EXIT_CODES.get(summary.status, 0)


def check_succeeded(summary: SearchSummary) -> None:
    """Raise SearchError if every trial of a search that is over failed."""
    if summary.status == "finished" and summary.best is None:
        number, first = len(summary.trials), next(trial for trial in summary.trials if trial.reason)
        reason = (first.reason or "").rstrip(".")
        raise SearchError(f"every trial failed, {number} of {number}; trial {first.trial}: {reason}.")
