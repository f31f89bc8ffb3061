"""Two real ranks: processes pinned to a core each, one learner each, that do as they are asked and tell their times.

Each rank trains through the package's own engine (`executor=threads`) and averages by gloo over the loopback device.
The clock is the host's monotonic one, so that moments of both ranks can be compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import mean
from typing import Any

import torch
import torch.distributed

from crossbow_py.averaging import Crossbow
from crossbow_py.averaging.rule import LinearRound, Stage
from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.distributed.collective import Collective, ProcessGroupCollective
from crossbow_py.engine.executors import Executor
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.loop.learners import new_executor
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.run import Run
from experiments.bench.machine import free_port
from experiments.bench.rounds import trainer_on_noise
from experiments.bench.windows import MAX_FOREIGN_SHARE

NUM_RANKS = 2
_NUM_IMAGES = 512
_WARM_UP_ROUNDS = 3
_REPLY_WITHIN_S = 300.0


@dataclass(frozen=True)
class Case:
    """A model of the zoo and a learner's batch size."""

    model: str
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.model} b={self.batch_size}"


@dataclass
class Measured:
    """A rank's figures of a window: seconds of tasks, and of processor time it took."""

    wall_s: float
    rounds: int = 0
    tasks: dict[str, list[float]] = field(default_factory=dict)
    calls: list[tuple[float, float]] = field(default_factory=list)
    checksum: float = 0.0
    own_s: float = 0.0

    @property
    def round_s(self) -> float:
        return self.wall_s / self.rounds


class Rank:
    """The windows that a rank can be asked for, a method each. Lives in the rank's own process."""

    def __init__(self) -> None:
        self._parts: dict[Case, Run] = {}

    def rounds(self, case: Case, num_rounds: int, period: int | None) -> Measured:
        """Rounds that average every `period`, or never; the clock runs from the end of warming up."""
        timeline = Timeline()
        collective = ProcessGroupCollective() if period else Collective()
        parts = dataclasses.replace(self._part(case), timeline=timeline, collective=collective)
        warm_up = -(-_WARM_UP_ROUNDS // (period or 1)) * (period or 1)
        with _executor(parts) as executor:
            self._submit(executor, parts, range(warm_up), period)
            executor.drain()
            torch.distributed.barrier()
            begun_s = time.perf_counter()
            self._submit(executor, parts, range(warm_up, warm_up + num_rounds), period)
            executor.drain()
            wall_s = time.perf_counter() - begun_s
        tasks = _spans(timeline, since_round=warm_up)
        return Measured(wall_s, num_rounds, tasks, checksum=float(parts.bank.z.storage.double().sum()))

    def passes(self, case: Case, repetitions: int) -> Measured:
        """The two passes over memory of an averaging task: the sum of the rank's corrections, and z's step."""
        parts = self._part(case)
        bank, coefficients = parts.bank, LinearRound(correction=0.5, momentum=0.9)
        bank.corrections.storage.zero_()
        torch.distributed.barrier()
        marks = [time.perf_counter()]
        for _ in range(repetitions):
            parts.update.sum(bank.total.trained(), [bank.corrections.trained(0)])
            marks.append(time.perf_counter())
            parts.update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], coefficients)
            marks.append(time.perf_counter())
        spans = [end - begin for begin, end in pairwise(marks)]
        return Measured(marks[-1] - marks[0], tasks={"sum": spans[::2], "move": spans[1::2]})

    def all_reduces(self, num_bytes: int, count: int, pause_s: float, beside: Case | None) -> Measured:
        """`count` all-reduces with pauses between them, while this rank trains `beside` without averaging, or idles."""
        values, calls = torch.zeros(num_bytes // 4), []
        collective = ProcessGroupCollective()
        with self._training(beside) as finished:
            torch.distributed.barrier()
            begun_s, rounds_before = time.perf_counter(), len(finished)
            for _ in range(count):
                time.sleep(pause_s)
                called_s = time.perf_counter()
                collective.all_reduce_sum(values)
                calls.append((called_s, time.perf_counter()))
            inside = finished[rounds_before:]
            wall_s = time.perf_counter() - begun_s
        rounds = len(inside) - 1
        return Measured(
            inside[-1] - inside[0] if rounds > 0 else wall_s, max(rounds, 0), tasks={"window": [wall_s]}, calls=calls
        )

    @contextlib.contextmanager
    def _training(self, case: Case | None) -> Iterator[list[float]]:
        finished: list[float] = []
        if case is None:
            yield finished
            return
        parts, over = dataclasses.replace(self._part(case), timeline=None, collective=Collective()), threading.Event()

        def train() -> None:
            with _executor(parts) as executor:
                index = 0
                while not over.is_set():
                    self._submit(executor, parts, range(index, index + 1), None)
                    index += 1
                    finished.append(time.perf_counter())
                executor.drain()

        thread = threading.Thread(target=train)
        thread.start()
        try:
            while len(finished) < _WARM_UP_ROUNDS:
                time.sleep(0.01)
            yield finished
        finally:
            over.set()
            thread.join()

    def _submit(self, executor: Executor, parts: Run, indices: range, period: int | None) -> None:
        rank, batch = torch.distributed.get_rank(), parts.train_feed.batch_size
        rule = Crossbow(averaging_period=period or 1)
        for index in indices:
            plan = plan_round(parts, index, (index * NUM_RANKS + rank) * batch, 1.0)
            averaging = rule.round(Stage(index, NUM_RANKS)) if period else None
            executor.submit(dataclasses.replace(plan, together=averaging))

    def _part(self, case: Case) -> Run:
        if case not in self._parts:  # built by `Trainer` as a user's are
            self._parts[case] = trainer_on_noise(
                case.model, _NUM_IMAGES, batch_size=case.batch_size, num_learners=1, executor="threads", device="cpu",
                precision="fp32",
            ).run  # fmt: skip
        return self._parts[case]


@contextlib.contextmanager
def _executor(parts: Run) -> Iterator[Executor]:
    executor = new_executor(parts)
    try:
        yield executor
    finally:
        executor.close()


def _spans(timeline: Timeline, since_round: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in timeline.trace()["traceEvents"]:
        if event["ph"] == "X" and event["args"]["round"] >= since_round:
            found.setdefault(event["name"], []).append(event["dur"] / 1e6)
    return found


def answer(connection: Connection, own: object) -> None:
    """In a rank's process: do what is asked for, a method of `own`, until it is nothing more."""
    while (asked := connection.recv()) is not None:
        method, arguments = asked
        before_s = time.process_time()
        measured: Measured = getattr(own, method)(**arguments)
        connection.send(dataclasses.replace(measured, own_s=time.process_time() - before_s))


def _serve(rank: int, core: int, port: int, connection: Connection) -> None:
    os.sched_setaffinity(0, {core})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS
    )  # fmt: skip
    answer(connection, Rank())
    torch.distributed.destroy_process_group()


class RankPair:
    """The two processes, from the outside. Use as a context manager.

    Args:
        max_foreign_share: windows during which other programs took more of the cores are of no use.
        serve: what a process does, given its rank, its core, the port at which ranks meet and its end of a pipe.

    Attributes:
        dropped: windows of no use so far.
    """

    def __init__(
        self, max_foreign_share: float = MAX_FOREIGN_SHARE,
        serve: Callable[[int, int, int, Connection], None] = _serve,
    ) -> None:  # fmt: skip
        self.dropped, self.foreign_shares = 0, list[float]()
        self.max_foreign_share, self._serve = max_foreign_share, serve

    def __enter__(self) -> RankPair:
        cores, port = sorted(usable_core_ids()), free_port()
        assert len(cores) >= NUM_RANKS, "two ranks need a core each"
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self._connections = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=self._serve, args=(rank, cores[rank], port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # its rank is gone
                connection.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def ask(
        self, method: str, attempts: int = 4, is_judged: bool = True, **arguments: Any
    ) -> list[Measured] | None:
        """One window on both ranks at once; tried again when others were busy, None when they were every time."""
        for _ in range(attempts):
            before = LoadSnapshot.take()
            for connection in self._connections:
                connection.send((method, arguments))
            answers = [self._answer(connection) for connection in self._connections]
            after = LoadSnapshot.take()
            own_s = after.own_s + sum(answer.own_s for answer in answers)
            share = foreign_share(before, dataclasses.replace(after, own_s=own_s))
            if share is None or not is_judged or share <= self.max_foreign_share:
                self.foreign_shares += [] if share is None else [share]
                return answers
            self.dropped += 1
            time.sleep(0.5)
        return None

    @staticmethod
    def _answer(connection: Connection) -> Measured:
        if not connection.poll(_REPLY_WITHIN_S):
            raise TimeoutError(f"a rank has not answered within {_REPLY_WITHIN_S:.0f} s.")
        answer: Measured = connection.recv()
        return answer


def transfer_s(answers: Sequence[Measured]) -> list[float]:
    """Seconds of every all-reduce from when the last rank has come to when the last one leaves."""
    calls = zip(*(answer.calls for answer in answers), strict=True)
    return [max(end for _, end in call) - max(begin for begin, _ in call) for call in calls]


def task_s(answers: Sequence[Measured], name: str) -> float:
    """Mean seconds of a task, over both ranks."""
    return mean(seconds for answer in answers for seconds in answer.tasks[name])
