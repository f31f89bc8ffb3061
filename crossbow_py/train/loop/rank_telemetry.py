"""The figures that ranks exchange for the dashboard: the pace of each, and the load of its node's GPUs.

It travels with the reports by which ranks synchronise, so it costs no exchange of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from crossbow_py.distributed.ranks import Place
from crossbow_py.distributed.synchronisation import Report
from crossbow_py.telemetry.rank_pace import RankCounts, RankMeter
from crossbow_py.telemetry.system import GpuLoad, SystemMonitor, gpu_load, job_sample
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.run import Run


class RankTelemetry:
    """Sends this rank's figures, and keeps those of all ranks. Owned by the training loop.

    Args:
        run: the run.
        meter: this rank's time and samples.
        monitor: reads the GPUs of this rank's node, if this rank is to; else None.

    Attributes:
        paces: the pace of every rank; of a single rank there is none.
    """

    def __init__(self, run: Run, meter: ThroughputMeter, monitor: SystemMonitor | None = None) -> None:
        self._run, self._meter, self._monitor = run, meter, monitor
        hosts = [place.host for place in run.places]
        self.paces = RankMeter(hosts, run.tokens_per_sample, waits_for_data=run.train_feed.STREAMS)
        self._loads: list[list[float]] = []

    def exchange(self, report: Report) -> list[Report]:
        """Return the reports of all ranks, which call it together; their figures come along."""
        ranks, meter = self._run.ranks, self._meter
        if ranks.num_ranks == 1:
            return [report]
        counts = RankCounts(report.elapsed_s, meter.waited_s, meter.rank_wait_s)
        load = GpuLoad() if self._monitor is None else gpu_load(self._monitor.newest)
        values = report.to_values()
        every = ranks.gather([*values, *counts, *load])
        first, second = len(values), len(values) + len(counts)
        self.paces.update([each[first:second] for each in every], self._run.state.round_index, meter.samples)
        self._loads = [each[second:] for each in every]
        return [Report.from_values(each[:first]) for each in every]

    @property
    def gpus(self) -> Mapping[str, float]:
        """The load of the GPUs of all nodes at the last exchange, by tags in TensorBoard."""
        return job_sample([GpuLoad(*each) for each in self._loads])


def ranks_beside(places: Sequence[Place], rank: int) -> list[int]:
    """Return the ranks on a rank's node, itself included, in order."""
    return [other for other, place in enumerate(places) if place.is_beside(places[rank])]


def node_name(places: Sequence[Place], rank: int) -> str:
    """Return the name of a rank's node in records: its number in the order of ranks, and its host."""
    nodes, own = list(dict.fromkeys((place.node, place.host) for place in places)), places[rank]
    host = re.sub(r"[^\w.-]", "_", own.host)
    return f"node_{nodes.index((own.node, own.host))}_{host}"
