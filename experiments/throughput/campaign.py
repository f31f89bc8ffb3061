"""Measures the cells of one model: a process for each executor and batch size, several passes over all cells.

The first pass goes from short rounds to long ones, because what it finds decides which cells are left out; the auto
side has its turn, and time put by for it, after the cells it is compared with. Further passes are in random order.
Between its windows a process is blocked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from experiments.bench.gate import Window
from experiments.bench.sides.side import AUTO, Side
from experiments.bench.workers import SideError, SideProcess
from experiments.bench.workloads import Effort, Workload
from experiments.throughput import planning
from experiments.throughput.comparison import Measurement
from experiments.throughput.planning import Cell, Cells, LeftOut, Limits, ProcessKey
from experiments.throughput.sides import start_side

_RETRY_AFTER_S = 0.5
# Beyond a model's time, after which a process that is at work is ended.
_GRACE_S = 5.0
_ORDER_SEED = 0

Start = Callable[[Side, Workload, Effort, float], SideProcess]


@dataclass(frozen=True)
class Plan:
    """The plan for a model: what to measure, and how.

    `tuning_share` of a model's time is for the auto side to choose an executor and settle.
    """

    cells: Cells
    limits: Limits
    max_foreign_share: float
    tuning_share: float = 0.55


class Campaign:
    """One model. Use as a context manager: leaving it ends the processes.

    Args:
        workload: the model and its images; the batch size is each cell's own.
        plan: what to measure.
        budget_s: how long it may take.
        start, clock, wait: processes and time, exchanged in tests.

    Attributes:
        measurements: by cell, with a window (or None) for every pass.
        left_out: by cell, why it was not measured.
        foreign_load_known: whether the kernel tells what others did.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        budget_s: float,
        *,
        start: Start = start_side,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._workload, self._plan, self._budget_s = workload, plan, budget_s
        self._start, self._clock, self._wait = start, clock, wait
        self._deadline_s = clock() + budget_s
        self._effort = Effort(0.1, 3, 2.0, tuning_s=plan.tuning_share * budget_s)
        self._processes: dict[ProcessKey, SideProcess] = {}
        self._failures: dict[ProcessKey, str] = {}
        self._rates: dict[Cell, float] = {}
        self._costs_s: dict[Cell, float] = {}
        self._starts_s: dict[ProcessKey, float] = {}
        self._stack = ExitStack()
        self.measurements: dict[Cell, Measurement] = {}
        self.left_out: dict[Cell, LeftOut] = {}
        self.foreign_load_known = True

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.dismiss()  # all of them first, so that they end side by side
        self._stack.close()

    def run(self) -> None:
        cells = self._plan.cells
        for cell in cells.single:
            self._first_window(cell)
        if cells.auto:
            self._first_windows(cells.main, self._plan.tuning_share * self._budget_s)
        for cell in cells.auto:
            self._first_window(cell)
        self._first_windows([*cells.main, *cells.others], reserved_s=0.0)
        draw = random.Random(_ORDER_SEED)
        for passes_left in reversed(range(self._plan.limits.passes - 1)):
            turns = list(self.measurements)
            draw.shuffle(turns)
            later_s = passes_left * self._one_pass_s(turns)
            for number, cell in enumerate(turns):
                self._next_window(cell, later_s + self._one_pass_s(turns[number + 1 :]))

    def _left_s(self) -> float:
        return self._deadline_s - self._clock()

    def _patience_s(self) -> float:
        return max(0.0, self._left_s()) + _GRACE_S

    def _one_pass_s(self, cells: Iterable[Cell]) -> float:
        """The seconds that a window of each will take, as far as is known."""
        return sum(self._costs_s.get(cell, 0.0) for cell in cells)

    def _promised_s(self) -> float:
        """The seconds that the passes after the first will take with the cells so far."""
        return (self._plan.limits.passes - 1) * self._one_pass_s(self.measurements)

    def _first_windows(self, cells: Iterable[Cell], reserved_s: float) -> None:
        """Measure the cells that were not yet, as far as there is time beside what is reserved for others."""
        for cell in cells:
            if cell in self.measurements:
                continue
            self.left_out.pop(cell, None)
            refusal = self._refusal(cell, reserved_s)
            if refusal is None:
                self._first_window(cell)
            else:
                self.left_out[cell] = refusal

    def _refusal(self, cell: Cell, reserved_s: float) -> LeftOut | None:
        if self._key(cell) in self._failures:
            return LeftOut("failure", self._failures[self._key(cell)])
        rate = planning.expected_images_per_s(cell, self._rates)
        if rate is None:
            return None
        start_s = planning.expected_start_s(cell, self._starts_s, self._plan.limits)
        left_s = self._left_s() - self._promised_s() - reserved_s
        return planning.left_out(cell, rate, start_s, left_s, self._plan.limits)

    def _first_window(self, cell: Cell) -> None:
        try:
            process = self._process(cell)
            if cell.side.side == AUTO:
                cell = Cell(cell.batch_size, process.side)
            measurement = Measurement(cell.side, process.ready)
            self._take_window(cell, measurement, self._promised_s())
        except SideError as error:
            self._fail(cell, error)
            self.left_out[cell] = LeftOut("failure", str(error))
            return
        self.measurements[cell] = measurement
        rate = f"about {self._rates[cell]:,.0f} images/s"
        print(f"{self._workload.model} b={cell.batch_size} {cell.side.label}: {rate}", flush=True)

    def _next_window(self, cell: Cell, later_s: float) -> None:
        measurement = self.measurements[cell]
        if self._key(cell) not in self._failures and self._costs_s[cell] <= self._left_s():
            try:
                self._take_window(cell, measurement, later_s)
            except SideError as error:
                self._fail(cell, error)
            else:
                return
        measurement.windows.taken.append(None)

    def _fail(self, cell: Cell, error: SideError) -> None:
        print(f"{self._workload.model} b={cell.batch_size}: {error}", flush=True)
        self._failures[self._key(cell)] = str(error)

    def _key(self, cell: Cell) -> ProcessKey:
        return cell.process_key(self._plan.limits)

    def _process(self, cell: Cell) -> SideProcess:
        key = self._key(cell)
        if key not in self._processes:
            side = replace(cell.side, num_learners=key.num_learners)
            begun_s = self._clock()
            process = self._start(
                side, replace(self._workload, batch_size=cell.batch_size), self._effort, self._patience_s()
            )
            self._stack.enter_context(process)
            self._processes[key] = process
            if warm_up := planning.warm_up(side, self._plan.limits):
                process.window(warm_up, self._patience_s())
            self._starts_s[key] = self._clock() - begun_s
        return self._processes[key]

    def _take_window(self, cell: Cell, measurement: Measurement, later_s: float) -> None:
        def take() -> Window:
            begun_s = self._clock()
            window = self._processes[self._key(cell)].window(
                planning.visit(cell, self._plan.limits), self._patience_s()
            )
            self._costs_s[cell], self._rates[cell] = self._clock() - begun_s, window.images_per_s
            self.foreign_load_known = self.foreign_load_known and window.foreign_share is not None
            return window

        def may_retry() -> bool:
            if self._left_s() - later_s < self._costs_s[cell] + _RETRY_AFTER_S:
                return False
            self._wait(_RETRY_AFTER_S)
            return True

        measurement.windows.add(take, may_retry, self._plan.max_foreign_share)
