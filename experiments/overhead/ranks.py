"""What do the figures of every rank cost on the dashboard, with eight ranks?

    python experiments/overhead/ranks.py [--repetitions 7 --seconds 60 600] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.distributed.ranks import Place, Ranks
from crossbow_py.distributed.synchronisation import SYNCHRONISE_EVERY_S, Report
from crossbow_py.telemetry.rank_pace import RankCounts
from crossbow_py.telemetry.records import file_listeners
from crossbow_py.telemetry.system import GpuLoad
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.loop.rank_telemetry import RankTelemetry
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter, run_info
from crossbow_py.train.train_state import TrainState
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.rounds import trainer_on_noise
from experiments.bench.windows import spread
from experiments.tables.markdown import columns_table, number_of, spread_of, spread_text

Result = Mapping[str, Any]
KIND, MOST_SHARE, WANTED_OF = "ranks", 0.005, 8
_IMAGES = 256  # of a synchronisation


@dataclass(frozen=True)
class Case:
    """A run: its ranks, the seconds from one synchronisation to the next, and whether its data are waited for."""

    num_ranks: int
    synchronise_s: float
    streams: bool

    @property
    def name(self) -> str:
        said = "before every round, as with streamed data" if self.streams else "as usual"
        return f"{self.num_ranks} ranks, {1000 * self.synchronise_s:.0f} ms apart, {said}"


CASES = (Case(8, SYNCHRONISE_EVERY_S, False), Case(8, 0.01, True), Case(64, SYNCHRONISE_EVERY_S, False))


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=7, help="of every case (default %(default)s)")
    add("--seconds", type=positive, nargs="+", default=[60.0, 600.0],
        help="of training that are acted out (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        cases = [measure_case(case, given.repetitions, each) for case in CASES for each in given.seconds]
        return {"kind": KIND, "cases": cases}

    return measure_and_write(parser, argv, measure, result_text)


def measure_case(case: Case, repetitions: int, seconds: float) -> dict[str, Any]:
    """The processor's time that the figures of ranks take of the writer's, with them and without them by turns."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(repetitions):
        for with_ranks in (True, False) if repetition % 2 else (False, True):
            taken[with_ranks].append(act_out(case, seconds, with_ranks))
    more = [own - base for own, base in zip(taken[True], taken[False], strict=True)]
    return {
        "name": case.name,
        "num_ranks": case.num_ranks,
        "seconds": seconds,
        "n": repetitions,
        "share": spread([own / seconds for own in more], 6),
        "share_of_all_records": spread([own / seconds for own in taken[True]], 6),
        "us_a_synchronisation": spread([1e6 * own * case.synchronise_s / seconds for own in more], 2),
    }


def act_out(case: Case, seconds: float, with_ranks: bool) -> float:
    """Seconds of the processor that reports and records of so much training take rank 0, its writer's thread included.

    Clocks are pretended, so nothing trains, and points are as far apart as in a run that lasts as long.
    """
    clock = _Clock()
    run = trainer_on_noise("lenet", _IMAGES, device="cpu", batch_size=32, num_learners=1, executor="serial").run
    ranks, state = _PretendedRanks(case.num_ranks), TrainState()
    meter = ThroughputMeter(clock, waited_for_ranks_s=lambda: 0.1 * clock())
    pretended = SimpleNamespace(
        ranks=ranks, state=state, places=[Place(0, "host")] * case.num_ranks, tokens_per_sample=None,
        train_feed=SimpleNamespace(STREAMS=case.streams),
    )  # fmt: skip
    telemetry = RankTelemetry(cast(Run, pretended), meter)
    with tempfile.TemporaryDirectory() as folder:
        listeners = file_listeners(Path(folder), None)
        reporter = Reporter(listeners, meter, clock, telemetry if with_ranks else None)
        reporter.start(dataclasses.replace(run_info(run, None), num_devices=case.num_ranks))
        meter.start()
        state.num_losses, begun_s = 1, time.process_time()
        for _ in range(round(seconds / case.synchronise_s)):
            clock.now_s += case.synchronise_s
            state.round_index += 1
            state.samples_seen += _IMAGES
            meter.update(_IMAGES)
            report = Report(meter.elapsed_s)
            if with_ranks:
                telemetry.exchange(report)
            else:
                [Report.from_values(each) for each in ranks.gather(report.to_values())]
            reporter.progress(state, 0.1, None, 1)
        reporter.close()
        return time.process_time() - begun_s - ranks.spent_s()


@dataclass
class _Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class _PretendedRanks(Ranks):
    """Ranks in one process: each has sent what rank 0 sends, the later ones having waited less and with GPUs at work.

    A vector of eight values more costs an exchange nothing that could be measured.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self._calls, self._values = 0, list[float]()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        self._calls, self._values = self._calls + 1, list(values)
        return self._every(values)

    def spent_s(self) -> float:
        """Seconds of the processor that pretending took: all calls are made once more."""
        begun_s = time.process_time()
        for _ in range(self._calls):
            self._every(self._values)
        return time.process_time() - begun_s

    def _every(self, values: Sequence[float]) -> list[list[float]]:
        every = [list(values) for _ in range(self.num_ranks)]
        first = len(Report(0.0).to_values())
        if len(values) > first:
            for rank, own in enumerate(every):
                counts = RankCounts(*own[first : first + len(RankCounts._fields)])
                load = GpuLoad(8, 90, 760, 60, 4000) if rank == 0 else GpuLoad()
                own[first:] = [*counts._replace(rank_wait_s=counts.rank_wait_s / (1 + rank)), *load]
        return every


def headline(result: Result) -> str:
    most: dict[int, Mapping[str, Any]] = {}
    for case in result["cases"]:
        known = most.setdefault(case["num_ranks"], case)
        if case["share"]["median"] > known["share"]["median"]:
            most[case["num_ranks"]] = case
    said = {
        number: f"Figures of {number} ranks take rank 0 {spread_text(case['share'], '.2%')} of {case['seconds']:g} s "
        "of training where they take the most"
        for number, case in most.items()
    }
    verdict = "reached" if most[WANTED_OF]["share"]["median"] <= MOST_SHARE else "missed"
    said[WANTED_OF] += f" (at most {MOST_SHARE:.1%} was wanted: {verdict})"
    return " ".join(f"{each}." for each in said.values())


def result_text(result: Result) -> str:
    table = columns_table(result["cases"], {
        "": "name", "seconds of training": number_of("seconds", "g"), "share of them": spread_of("share", ".3%"),
        "µs a synchronisation": spread_of("us_a_synchronisation", ".0f"),
        "share of all records": spread_of("share_of_all_records", ".2%"), "n": "n",
    })  # fmt: skip
    return f"{headline(result)}\n\n{table}"


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
