"""A profile of operators: torch's profiler, over all threads and CUDA, for some rounds of a run.

It starts once training is under way and stops by itself, as its records grow by megabytes a second. That all threads
are recorded is a private setting of torch's, `_ExperimentalConfig`, tried with torch 2.13.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from crossbow_py.core.errors import one_line
from crossbow_py.core.files import replacing
from crossbow_py.telemetry.events import NotingListener, Progress, RunInfo, Summary
from crossbow_py.telemetry.records import write_atomically

PROFILE_FILE, TABLE_FILE = "profile.json.gz", "profile.txt"
_BEGIN_AFTER_S = 1.0  # of training: first rounds are slower
_LEAST_S = 0.5  # between the first and the last round, or one round where that takes longer
_ROWS, _NAMED = 40, 4  # operators in the table, and in the sentence
_LOG_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "99"


class OperatorProfile(NotingListener):
    """Writes `profile.json.gz`, a timeline of operators, and `profile.txt`, the operators by their own time.

    Args:
        folder: the run's folder.
    """

    BLOCKS = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: Any = None
        self._first_s: float | None = None  # of training, at the first sign of this process's
        self._begun_s: float | None = None  # at the first sign under the profiler, whose own start takes seconds
        self._on_cuda = self._is_over = False

    def on_start(self, info: RunInfo) -> None:
        self._on_cuda = info.device.startswith("cuda")

    def on_progress(self, progress: Progress) -> None:
        now_s = progress.elapsed_s
        if self._first_s is None:
            self._first_s = now_s
        elif not self._is_over and self._profile is None and now_s >= self._first_s + _BEGIN_AFTER_S:
            self._begin()
        elif self._profile is not None and self._begun_s is None:
            self._begun_s = now_s
        elif self._begun_s is not None and not self._is_over and now_s - self._begun_s >= _LEAST_S:
            self._write(now_s - self._begun_s)

    def on_end(self, summary: Summary) -> None:
        if self._is_over:
            return
        if self._begun_s is None:
            self._notes += ("No profile: training was over within seconds; let it train longer, by max_epochs.",)
        else:
            self._write(summary.train_time_s - self._begun_s)

    def close(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        # Learners' threads run before the profiler is there, which by itself looks at its own thread alone.
        threads = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=threads)
        try:
            with _quiet():
                self._profile.__enter__()
        except RuntimeError as error:  # somebody else profiles this process
            self._profile, self._is_over = None, True
            self._notes += (f"No profile: {one_line(error)}.",)

    def _write(self, length_s: float) -> None:
        found, self._is_over = self._profile, True
        try:
            if self._on_cuda:
                torch.cuda.synchronize()  # host–device synchronisation: kernels under way belong to the profile
            self.close()
        except RuntimeError as error:  # of a device that is lost, which ends the run with an error of its own
            self._profile = None
            self._notes += (f"No profile: {one_line(error)}.",)
            return
        operators = found.key_averages()
        with tempfile.TemporaryDirectory(dir=self._folder) as aside, replacing(self._folder / PROFILE_FILE) as partial:
            found.export_chrome_trace(f"{aside}/{PROFILE_FILE}")  # compressed, by the ending of its name
            Path(aside, PROFILE_FILE).rename(partial)
        order = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        write_atomically(self._folder / TABLE_FILE, operators.table(sort_by=order, row_limit=_ROWS))
        times = sorted(((float(getattr(each, order)), str(each.key)) for each in operators), reverse=True)
        whole = sum(time for time, _ in times) or 1.0
        leading = ", ".join(f"{name} {time / whole:.0%}" for time, name in times[:_NAMED])
        self._notes += (
            f"Profiled {length_s:.1f} s of training: {leading}. {TABLE_FILE} has the operators by time, {PROFILE_FILE} "
            "when they ran (open it in ui.perfetto.dev).",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's library, which prints on stderr when it starts and stops. It reads its log level once."""
    level = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = level or _NOTHING
    try:
        yield
    finally:
        if level is None:
            del os.environ[_LOG_LEVEL]
