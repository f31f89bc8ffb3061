"""Images/s of training for several numbers of workers and batch sizes, and what the sizing rule recommends.

    python experiments/workers/run.py [--batch-sizes 4 8 16 32 64 --workers 0 1 2 3 4] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.host import Host, read_host
from crossbow_py.data.streaming.loader import BATCHES_A_WORKER
from crossbow_py.data.streaming.streamed_data import Key
from crossbow_py.engine.device.host import intra_op_threads
from crossbow_py.engine.sizing.workers import Loading, recommend
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.streamed_runs import SIZE, Photographs, Setup, StreamedRun, photographs
from experiments.bench.windows import MAX_FOREIGN_SHARE, Window, Windows, wait_until, waiting
from experiments.tables.markdown import NONE, Column, columns_table, number, number_of, spread_of

Result = Mapping[str, Any]
NETWORKS = {"light": 16, "heavy": 96}  # widths: starved of data by one worker, and not
NEAR_BEST = 0.95
_WARM_UP_S = 0.3
_BUFFERED = 2  # batches that the feed holds beside those of its workers
_BATCHES_OF_EACH = 6  # of every worker in a window, for their batches come in bunches
_RETRY_UNTIL_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--folder")
    add = parser.add_argument
    add("--batch-sizes", type=count, nargs="+", default=(4, 8, 16, 32, 64), metavar="B", help="samples a batch")
    add("--workers", type=count, nargs="+", default=(1, 2, 3, 4), metavar="W", help="processes, beside none")
    add("--seconds", type=positive, default=1.2, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=3, help="windows a point (default %(default)s)")
    return measure_and_write(
        parser, argv,
        lambda given: measure_workers(given.folder, given.batch_sizes, given.workers, given.seconds, given.repetitions),
        result_text,
    )  # fmt: skip


@dataclass
class Cell:
    """A network and a batch size, with windows by number of workers; 0 is among them."""

    network: str
    batch_size: int
    windows: dict[int, Windows[Window]]

    def fetch_s(self) -> float | None:
        """Seconds of loading a sample, from rounds with nothing beside it."""
        return self._alone(lambda share: share)

    def step_s(self) -> float | None:
        """Seconds of training on a sample, from the same rounds."""
        return self._alone(lambda share: 1 - share)

    def _alone(self, part: Callable[[float], float]) -> float | None:
        kept = self.windows[0].kept()
        return median(part(w.wait_share) * w.round_s for w in kept) / self.batch_size if kept else None


@dataclass
class Pace:
    """The length of a window, for batches that take a while to make."""

    seconds: float
    fetch_s: float
    begun_s: float = field(default_factory=time.monotonic)

    def warm_up_s(self, batch_size: int, num_workers: int) -> float:
        """Workers start, and one core fills all that is made ahead."""
        return _WARM_UP_S + (BATCHES_A_WORKER * num_workers + _BUFFERED) * batch_size * self.fetch_s

    def window_s(self, batch_size: int, num_workers: int) -> float:
        """The length asked for, and more where batches of several workers would come in few bunches."""
        return max(self.seconds, _BATCHES_OF_EACH * num_workers * batch_size * self.fetch_s)


def measure_workers(
    folder: str, batch_sizes: Sequence[int], num_workers: Sequence[int], seconds: float, repetitions: int
) -> dict[str, Any]:
    """Images/s by network, batch size and number of workers, as plain values; 0 workers are always measured.

    Raises:
        UserError: there are no such images, or no round fits into `seconds`.
    """
    images, workers = photographs(folder), sorted({0, *num_workers})
    cells = [
        Cell(network, size, {number: Windows() for number in workers})
        for network in NETWORKS
        for size in sorted(set(batch_sizes))
    ]
    with intra_op_threads(1):
        pace = Pace(seconds, fetch_seconds(images))
        runs = [StreamedRun(Setup(NETWORKS[cell.network], cell.batch_size), images) for cell in cells]
        for run in runs:
            run.rounds_window(0, 1, 1)
        for _ in range(repetitions):
            for cell, run in zip(cells, runs, strict=True):
                _repetition(cell, run, pace)
    return {
        "folder": Path(folder).name,
        "images": images.num_files,
        "size": SIZE,
        "num_workers": workers,
        "method": {
            "seconds": seconds,
            "repetitions": repetitions,
            "max_foreign_share": MAX_FOREIGN_SHARE,
            "foreign_load_known": all(each.load_known for cell in cells for each in cell.windows.values()),
        },
        "cells": [summary(cell, runs[0].sample_bytes, read_host()) for cell in cells],
    }


def fetch_seconds(images: Photographs) -> float:
    """The seconds of loading a sample, once all files are in the page cache."""
    keys = [Key(0, sample) for sample in range(images.num_files)]
    for _ in range(2):
        begun_s = time.perf_counter()
        images.data.fetch(keys, seed=0, training=True, on_sample=_tell_nobody)
        taken_s = time.perf_counter() - begun_s
    return taken_s / images.num_files


def _tell_nobody(sample: int) -> None:
    """Nobody watches this process."""


def _repetition(cell: Cell, run: StreamedRun, pace: Pace) -> None:
    for workers, windows in cell.windows.items():
        warm_up_s, window_s = pace.warm_up_s(cell.batch_size, workers), pace.window_s(cell.batch_size, workers)
        take = partial(run.timed_window, workers, warm_up_s, window_s)
        windows.add(take, wait_until(pace.begun_s + _RETRY_UNTIL_S))


def summary(cell: Cell, sample_bytes: int, host: Host) -> dict[str, Any]:
    """Sum up a cell: what was measured, what the rule makes of it, and how near to the best that comes.

    `at_recommended` is images/s with the recommended number of workers by those with the best, within repetitions; None
    where one of the two was not measured.
    """
    fetch_s, step_s = cell.fetch_s(), cell.step_s()
    loading = Loading(sample_bytes, fetch_s=fetch_s, step_s=step_s, through_shared=True)
    recommended = None if loading.needed is None else recommend(cell.batch_size, loading, host).num_workers
    rates = {
        number: median(window.images_per_s for window in windows.kept())
        for number, windows in cell.windows.items()
        if windows.kept()
    }
    best = max(rates, key=lambda number: rates[number], default=None)
    return {
        "network": cell.network,
        "batch_size": cell.batch_size,
        "fetch_ms": None if fetch_s is None else round(1000 * fetch_s, 3),
        "step_ms": None if step_s is None else round(1000 * step_s, 3),
        "needed": loading.needed,
        "recommended": recommended,
        "best": best,
        "at_recommended": _ratio(cell, recommended, best),
        "rows": [{"num_workers": number, **waiting(windows)} for number, windows in cell.windows.items()],
    }


def _ratio(cell: Cell, number: int | None, best: int | None) -> dict[str, float] | None:
    if number is None or best is None or number not in cell.windows:
        return None
    return cell.windows[number].ratio(cell.windows[best])


def headline(result: Result) -> str:
    cells = result["cells"]
    judged = [cell for cell in cells if cell["at_recommended"] is not None]
    near = [cell for cell in judged if is_near(cell)]
    return (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}. With "
        f"the recommended workers, training is within {1 - NEAR_BEST:.0%} of the best number in {len(near)} of "
        f"{len(judged)} cases that were measured."
    )


def is_near(cell: Mapping[str, Any]) -> bool:
    return bool(cell["at_recommended"]["median"] >= NEAR_BEST)


def workers_table(result: Result) -> str:
    def rate(place: int) -> Column:
        return lambda cell: number(cell["rows"][place]["images_per_s"], ",.0f")

    def near(cell: Mapping[str, Any]) -> str:
        return NONE if cell["at_recommended"] is None else "yes" if is_near(cell) else "no"

    return columns_table(result["cells"], {
        "": "network", "B": "batch_size", "load, ms": number_of("fetch_ms", ".2f"),
        "step, ms": number_of("step_ms", ".2f"),
        **{f"W={workers}": rate(place) for place, workers in enumerate(result["num_workers"])},
        "best W": number_of("best", "d"), "needed W": number_of("needed", "d"),
        "recommended W": number_of("recommended", "d"), "÷ best": spread_of("at_recommended"),
        f"within {1 - NEAR_BEST:.0%}": near,
    })  # fmt: skip


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\nImages/s, by workers:\n\n{workers_table(result)}\n\n{counts_line(result)}"


def counts_line(result: Result) -> str:
    rows = [row for cell in result["cells"] for row in cell["rows"]]
    fewest, most, dropped = min(r["n"] for r in rows), max(r["n"] for r in rows), sum(r["dropped"] for r in rows)
    n = str(most) if fewest == most else f"{fewest} to {most}"
    return f"n = {n} windows a point; {dropped} were dropped."


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
