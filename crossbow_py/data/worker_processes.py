"""How worker processes are started, and what signals they leave to the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator


def start_method() -> str | None:
    """Forked where that is usual: workers then start at once, and data sets need not be pickled."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() and os.name == "posix" else None


def leave_signals_to_the_run(_: int) -> None:
    """For `worker_init_fn`: Ctrl-C goes to every process of a terminal, and the run ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def kept_child_handler() -> Iterator[None]:
    """Around the start of a DataLoader, which would have workers' deaths raise out of whatever the main thread does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
