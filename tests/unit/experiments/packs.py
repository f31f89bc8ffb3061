"""Processes that only pretend to train, and what tests of comparisons of packs start from."""

from __future__ import annotations

from typing import Any

from experiments.bench.gate import Ready, Visit, Window
from experiments.bench.packs.comparison import PackCell
from experiments.bench.packs.side import PackSide, PackWorkload
from experiments.bench.windows import Windows
from experiments.bench.workers import SideError
from experiments.bench.workloads import Effort

# Images/s that sides pretend to have.
RATES = {
    "default_loop": 100.0, "tuned_single": 200.0, "serial": 150.0, "default_ensemble": 125.0, "threads": 300.0,
    "fused": 500.0, "fused_threads": 400.0, "captured": 250.0, "streams": 300.0,
}  # fmt: skip


class PretendedProcess:
    """Stands where a SideProcess would be. Sides in `absent` cannot be had."""

    absent: tuple[str, ...] = ()
    visits: list[tuple[str, Visit]] = []  # noqa: RUF012 - a test sets its own

    def __init__(self, body: object, side: PackSide, workload: PackWorkload, effort: Effort) -> None:
        if side.side in self.absent:
            raise SideError(f"side {side.label}: not here")
        self.side, self.ready = side, Ready(1, "")

    def __enter__(self) -> PretendedProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing has been started."""

    def window(self, visit: Visit) -> Window:
        self.visits.append((self.side.side, visit))
        return Window(round(RATES[self.side.side] * visit.seconds * 100), visit.seconds * 100, 0.0)


def cell(side: PackSide, workload: PackWorkload, *rates: float | None, **more: Any) -> PackCell:
    """With windows of a second at these images/s."""
    windows = [None if rate is None else Window(round(rate), 1.0, 0.0) for rate in rates]
    return PackCell(side, workload, Windows(windows, **more), Ready(2, ""))
