"""Simulates rounds of SMA on 1 to 1024 GPUs, for several models and networks.

    python experiments/scaling/run.py [--rounds 512] [--json PATH]

README.md says what is assumed and what follows. Nothing is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.scaling.inputs import (
    GPU,
    GPU_COUNTS,
    HIDDEN_SHARE,
    SYNCHRONOUS,
    WORKLOADS,
    Workload,
    last_bucket_bytes,
    slowdown,
)
from experiments.scaling.network import NETWORKS, Network
from experiments.scaling.report import result_text
from experiments.scaling.simulator import Averaging, Tasks, sma_round_s, synchronous_round_s

PERIODS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STRAGGLERS_OF = 1  # of WORKLOADS: short rounds, which have the least to spare


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--rounds", type=count, default=512, help="a point, after as many to warm up (%(default)s)")
    return measure_and_write(parser, argv, lambda given: simulate(given.rounds), result_text)


def simulate(rounds: int) -> dict[str, Any]:
    workload, network = WORKLOADS[_STRAGGLERS_OF], NETWORKS[0]
    scene = Scene(workload, Network.from_values(network), rounds)
    return {
        "rounds": rounds,
        "gpu_counts": GPU_COUNTS,
        "inputs": {"workloads": [asdict(each) for each in WORKLOADS], "networks": NETWORKS, "gpu": GPU,
                   "synchronous": SYNCHRONOUS},
        "scenes": [
            {"workload": each.name, "network": own["name"],
             **scene_values(Scene(each, Network.from_values(own), rounds))}
            for each in WORKLOADS for own in NETWORKS
        ],
        "stragglers": {
            "workload": workload.name, "network": network["name"], "gpus": GPU_COUNTS[-1],
            "rows": stragglers(scene, GPU_COUNTS[-1]),
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """The way ranks are kept together: SMA with its periods, or synchronous data parallelism."""

    period: int = 1
    node_period: int = 1
    patient: bool = True
    synchronous: bool = False

    @property
    def name(self) -> str:
        if self.synchronous:
            return "synchronous"
        if self.node_period > 1:
            return f"H={self.node_period}"
        return f"τ={self.period}{'' if self.patient else ', all waiting'}"


SYNCHRONOUS_MODE = Mode(synchronous=True)


class Scene:
    """One workload on one network. `rounds` are simulated after as many to warm up."""

    def __init__(self, workload: Workload, network: Network, rounds: int) -> None:
        self.workload, self.network, self._rounds, self._tasks = workload, network, rounds, workload.tasks()

    def round_s(self, mode: Mode, num_gpus: int, tasks: Tasks | None = None, free_network: bool = False) -> float:
        """Mean seconds a round. A `free_network` takes no time: what then remains is waiting for the slowest."""
        tasks, reduce_s = tasks or self._tasks, 0.0 if free_network else 1.0
        size, network = self.workload.vector_bytes, self.network
        lost = slowdown(network, num_gpus)
        if mode.synchronous:
            tail = last_bucket_bytes(size)
            bulk_s = network.all_reduce_s(num_gpus, size - tail) if size > tail else 0.0
            return synchronous_round_s(
                tasks,
                num_gpus,
                bulk_s=reduce_s * bulk_s,
                tail_s=reduce_s * network.all_reduce_s(num_gpus, tail),
                overlap=SYNCHRONOUS["overlap"],
                slowdown=lost,
                rounds=self._rounds,
            )
        if num_gpus * self.workload.num_learners == 1:
            return tasks.learning_s + tasks.correction_s  # plain SGD
        averaging = Averaging(
            all_s=reduce_s * network.all_reduce_s(num_gpus, size),
            period=mode.period,
            node_period=mode.node_period,
            node_s=reduce_s * network.inside_node_s(num_gpus, size),
            ranks_per_node=network.gpus_per_node,
            patient=mode.patient,
        )
        return sma_round_s(tasks, num_gpus, averaging, slowdown=lost, warm_up=self._rounds, rounds=self._rounds)

    @property
    def alone_s(self) -> float:
        """A round of one GPU without any averaging, the mean."""
        return self._tasks.learning_s + self._tasks.correction_s

    def point(self, mode: Mode, num_gpus: int) -> dict[str, float]:
        """One point of a curve.

        `exposed` is the share of a round by which it is longer than without any averaging, `waiting` what remains of
        it on a network that takes no time, `efficiency` images/s by GPUs times those of one GPU that averages in every
        round.
        """
        round_s = self.round_s(mode, num_gpus)
        free_s = self.round_s(mode, num_gpus, free_network=True)
        single_s = self.round_s(Mode(), 1)
        return {
            "round_ms": round(1000 * round_s, 4),
            "images_per_s": round(num_gpus * self.workload.images_a_round / round_s),
            "efficiency": round(single_s / round_s, 4),
            "exposed": round(max(0.0, 1 - self.alone_s / round_s), 4),
            "waiting": round(max(0.0, 1 - self.alone_s / free_s), 4),
        }

    def exposed(self, mode: Mode, num_gpus: int) -> float:
        return 1 - self.alone_s / self.round_s(mode, num_gpus)

    def shortest(self, mode_of: Callable[[int], Mode], counts: Sequence[int]) -> int | None:
        """The shortest of `PERIODS` that hides averaging at all these numbers of GPUs; None when none does."""
        for period in PERIODS:
            mode = mode_of(period)
            if all(self.exposed(mode, count) <= HIDDEN_SHARE for count in reversed(counts)):
                return period
        return None


def scene_values(scene: Scene, counts: Sequence[int] = GPU_COUNTS) -> dict[str, Any]:
    periods = {
        "period": scene.shortest(lambda period: Mode(period=period), counts),
        "waiting_period": scene.shortest(lambda period: Mode(period=period, patient=False), counts),
        "node_period": scene.shortest(lambda period: Mode(node_period=period), counts),
    }
    modes = [Mode(), SYNCHRONOUS_MODE]
    modes += [mode for mode in (Mode(period=periods["period"] or 1), Mode(node_period=periods["node_period"] or 1))
              if mode != Mode()]  # fmt: skip
    points = {mode.name: [scene.point(mode, count) for count in counts] for mode in modes}
    curves = {name: {key: [point[key] for point in own] for key in own[0]} for name, own in points.items()}
    shares = curves[Mode().name]["exposed"]
    over = [count for count, share in zip(counts, shares, strict=True) if share > HIDDEN_SHARE]
    return {
        "all_reduce_us": [round(1e6 * scene.network.all_reduce_s(n, scene.workload.vector_bytes), 1) for n in counts],
        "exposed_from": over[0] if over else None,
        **periods,
        "curves": curves,
    }


def stragglers(scene: Scene, num_gpus: int) -> list[dict[str, float]]:
    """Share of a round lost, for other guesses of how learning varies: SMA in every round beside synchronous."""
    rows = []
    for cv, rank_cv in ((0.0, 0.0), (0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.2, 0.0), (0.02, 0.01), (0.02, 0.03)):
        tasks = replace(scene.workload.tasks(), cv=cv, rank_cv=rank_cv)
        lost = {
            name: 1 - scene.alone_s / scene.round_s(mode, num_gpus, tasks)
            for name, mode in (("sma", Mode()), ("synchronous", SYNCHRONOUS_MODE))
        }
        rows.append({"cv": cv, "rank_cv": rank_cv, **{name: round(share, 4) for name, share in lost.items()}})
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
