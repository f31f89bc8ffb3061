"""One server of forked processes for all tests of a session.

Whoever starts one names what it is to import; whoever comes later forks from that one, and would import in each of its
processes, for seconds, what the server has not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

_ROOT = Path(__file__).parents[1]
_PRELOADED = [
    "torch", "torch.export._trace", "torch._functorch.aot_autograd", "torch._inductor.decomposition",
    "crossbow_py.train.__main__", "crossbow_py.search.build", "crossbow_py.search.report.listeners",
    "experiments.throughput.sides", "tests.ranks", "tests.search_processes",
]  # fmt: skip


def one_for_all() -> Callable[[Sequence[str]], None]:
    """In place of `set_forkserver_preload`: starts the one server, with the environment and in the folder of now."""
    environment, set_preload = dict(os.environ), forkserver.set_forkserver_preload

    def start(_: Sequence[str]) -> None:
        set_preload(_PRELOADED)
        here = Path.cwd()
        os.chdir(_ROOT)
        try:
            with patch.dict(os.environ, environment, clear=True):
                forkserver.ensure_running()
        finally:
            os.chdir(here)

    return start
